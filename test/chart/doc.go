// SPDX-License-Identifier: Apache-2.0

// Package chart tests the Helm chart in deploy/chart with Helm itself, and keeps what it renders by default, deploy/redirector.yaml, in
// step. It is a module of its own, because Helm wants other versions of Kubernetes's libraries than the agent.
package chart
