// SPDX-License-Identifier: Apache-2.0

// Package zdsapi holds the messages of ZDS, the protocol between the node agent
// and a node proxy, as generated from zds.proto.
package zdsapi

// Needs protoc (Debian: protobuf-compiler); the Go plugin is a tool of this module.
//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --go_out=. --go_opt=paths=source_relative zds.proto"
