// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

// peer is a node proxy that runs for no pod, but says so to every request: with the refusal to adds, if it has one.
type peer struct {
	conn *net.UnixConn
	done sync.WaitGroup
}

func dialPeer(t *testing.T, socket, refusal string) *peer {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{conn: conn}
	p.send(t, &zdsapi.ZdsHello{Version: zdsapi.Version_V1})
	p.done.Go(func() { p.serve(t, refusal) })
	t.Cleanup(p.close)
	return p
}

func (p *peer) close() {
	_ = p.conn.Close()
	p.done.Wait()
}

func (p *peer) serve(t *testing.T, refusal string) {
	msg, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, _, _, err := p.conn.ReadMsgUnix(msg, rights)
		if err != nil || n == 0 {
			return
		}
		if received, err := unix.ParseSocketControlMessage(rights[:oobn]); err == nil {
			for i := range received {
				fds, _ := unix.ParseUnixRights(&received[i])
				for _, fd := range fds {
					_ = unix.Close(fd)
				}
			}
		}
		var request zdsapi.WorkloadRequest
		if err := proto.Unmarshal(msg[:n], &request); err != nil {
			t.Error(err)
			return
		}
		ack := &zdsapi.Ack{}
		if request.GetAdd() != nil {
			ack.Error = refusal
		}
		p.send(t, &zdsapi.WorkloadResponse{Payload: &zdsapi.WorkloadResponse_Ack{Ack: ack}})
	}
}

func (p *peer) send(t *testing.T, m proto.Message) {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Error(err)
		return
	}
	_, _ = p.conn.Write(b) // fails when the server is gone, which is its right
}
