// SPDX-License-Identifier: Apache-2.0

package zds

import (
	"errors"
	"fmt"
	"strings"
	"unicode"

	"google.golang.org/protobuf/proto"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

// maxMessage is the largest message either side accepts, in bytes. It is the
// size of the buffer that ztunnel reads into; it takes a longer one for broken.
const maxMessage = 1024

// parseHello says what is wrong with the first message of a peer.
func parseHello(msg []byte) error {
	var hello zdsapi.ZdsHello
	if err := proto.Unmarshal(msg, &hello); err != nil {
		return fmt.Errorf("sent %d bytes that are no hello: %w", len(msg), err)
	}
	switch v := hello.GetVersion(); v {
	case zdsapi.Version_V1:
		return nil
	case zdsapi.Version_NOT_USED:
		return fmt.Errorf("sent %d bytes that are no hello: no version in it", len(msg))
	default:
		return fmt.Errorf("speaks ZDS version %d, only version %d is supported", v, zdsapi.Version_V1)
	}
}

// parseAck returns the error text of a peer's answer, on one line; "" is yes.
func parseAck(msg []byte) (refusal string, err error) {
	var response zdsapi.WorkloadResponse
	if err := proto.Unmarshal(msg, &response); err != nil {
		return "", fmt.Errorf("sent %d bytes that are no response: %w", len(msg), err)
	}
	ack := response.GetAck()
	if ack == nil {
		return "", errors.New("sent a response without an ack")
	}
	return oneLine(ack.GetError()), nil
}

// oneLine makes a text from a peer fit for a log line and for a terminal.
func oneLine(text string) string {
	if text == "" {
		return ""
	}
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	text = strings.Join(strings.Fields(text), " ")
	if text == "" {
		// Blank or not, a text is a refusal.
		return "unreadable error text"
	}
	return text
}

func encodeAdd(p Pod) ([]byte, error) {
	return encode(&zdsapi.WorkloadRequest{Payload: &zdsapi.WorkloadRequest_Add{Add: &zdsapi.AddWorkload{
		Uid: p.UID,
		WorkloadInfo: &zdsapi.WorkloadInfo{
			Name:           p.Name,
			Namespace:      p.Namespace,
			ServiceAccount: p.ServiceAccount,
		},
	}}})
}

func encodeKeep(uid string) ([]byte, error) {
	return encode(&zdsapi.WorkloadRequest{Payload: &zdsapi.WorkloadRequest_Keep{
		Keep: &zdsapi.KeepWorkload{Uid: uid},
	}})
}

func encodeDel(uid string) ([]byte, error) {
	return encode(&zdsapi.WorkloadRequest{Payload: &zdsapi.WorkloadRequest_Del{
		Del: &zdsapi.DelWorkload{Uid: uid},
	}})
}

func encodeSnapshotSent() ([]byte, error) {
	return encode(&zdsapi.WorkloadRequest{Payload: &zdsapi.WorkloadRequest_SnapshotSent{
		SnapshotSent: &zdsapi.SnapshotSent{},
	}})
}

func encode(request *zdsapi.WorkloadRequest) ([]byte, error) {
	msg, err := proto.Marshal(request)
	if err != nil {
		return nil, err
	}
	if len(msg) > maxMessage {
		return nil, fmt.Errorf("the message has %d bytes, a node proxy reads %d at most", len(msg), maxMessage)
	}
	return msg, nil
}
