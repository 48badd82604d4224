// SPDX-License-Identifier: Apache-2.0

// Package metrics exports what the agent and the dataplane do to Prometheus. Numbers of the dataplane are read from the maps when
// somebody scrapes, and cost nothing until then; durations are noted where they arise. docs/metrics.md is made from the tables
// in this package.
package metrics
