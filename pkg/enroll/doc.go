// SPDX-License-Identifier: Apache-2.0

// Package enroll turns what is wanted for a pod into what is so: routes, sysctls, seals and programs in its network
// namespace, entries in the maps, and the proxy's word that it runs for the pod. It is the only package that changes a
// pod's network namespace, and it owns the files that say which pods are enrolled.
//
// An enrolment is a list of steps, each of which may be repeated and knows how it is undone:
//
//	state file, own addresses, routing, sysctls, seals, steer program, exceptions, map entry (capture is on), counters, probe targets, proxy
//
// What fails before capture is on is undone in reverse. Once capture is on it stays on, proxy or not: what should go
// through the proxy and cannot, does not go.
package enroll
