// SPDX-License-Identifier: Apache-2.0

// Package zds is the server side of ZDS: it tells the node proxies of this node
// (ztunnel, or any other that speaks the protocol) for which pods they shall
// run, and hands each the pod's network namespace.
//
// The server holds what is wanted (Set, Remove) and, per connection, what that
// peer knows. Each connection has one goroutine that looks for a difference
// between the two, sends one request for it, waits for the answer, writes down
// what the peer knows now, and looks again. There is no queue of events, so
// nothing can overflow, be lost or arrive in the wrong order, and a peer that
// misbehaves only ever stops its own goroutine.
//
// The package owns the socket file and its connections. It uses a pod's network
// namespace only to duplicate its file descriptor for sending; it never enters
// one, and refuses the host's.
package zds
