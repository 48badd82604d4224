// SPDX-License-Identifier: Apache-2.0

// Package api is how the command line, and whoever else is root on the node, talks to the agent: HTTP and JSON over a Unix
// socket that only root may connect to.
//
//	POST   /v1/pods                 enrol a pod: EnrollRequest; answers with an enroll.Pod
//	GET    /v1/pods                 all enrolled pods: a list of enroll.Pod
//	GET    /v1/pods/{uid}           one enrolled pod: enroll.Pod
//	POST   /v1/pods/{uid}/settings  change settings of an enrolled pod, all or none: SettingsRequest; answers with an enroll.Pod
//	DELETE /v1/pods/{uid}           unenrol a pod; one that is not enrolled is no error
//	GET    /v1/pods/{uid}/inspection  all about one enrolled pod, the kernel having been asked: Inspection
//	POST   /v1/pods/{uid}/verification  check one enrolled pod with real packets: Verification
//	GET    /v1/explain              what becomes of a connection: explain.Answer; of the pod with the UID pod, from and to being
//	                                addresses with ports, and by, protocol and via as in explain.Query
//	GET    /v1/monitor              what happens from now on, a monitor.Event a line, of what passes a monitor.Filter
//	GET    /v1/status               the agent, its node proxies, totals and what needs attention: Status
//
// A request that is not carried out is answered with an Error. Names of fields and values of Kind are stable.
//
// The package owns the socket. What it does to pods it does through pkg/enroll.
package api
