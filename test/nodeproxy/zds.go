// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/redirector-dataplane/redirector/pkg/zds/zdsapi"
)

// maxMessage is ztunnel's read buffer, in bytes.
const maxMessage = 1024

// zdsConn is a connection to the agent.
type zdsConn struct {
	*net.UnixConn
}

func dialZDS(path string) (*zdsConn, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	return &zdsConn{c}, nil
}

func (c *zdsConn) send(m proto.Message) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	_, err = c.Write(b)
	return err
}

func (c *zdsConn) sendHello() error {
	return c.send(&zdsapi.ZdsHello{Version: zdsapi.Version_V1})
}

// sendAck answers a request: refused, if there is an error.
func (c *zdsConn) sendAck(refusal error) error {
	ack := &zdsapi.Ack{}
	if refusal != nil {
		ack.Error = refusal.Error()
	}
	return c.send(&zdsapi.WorkloadResponse{Payload: &zdsapi.WorkloadResponse_Ack{Ack: ack}})
}

// request is one of four.
type request struct {
	add          *zdsapi.AddWorkload
	netnsFD      int // comes with add; the receiver has to close it
	del          string
	keep         string
	snapshotSent bool
}

// recv reads a request. It is strict: an agent that does not keep to the protocol
// must not pass a test.
func (c *zdsConn) recv() (request, error) {
	buf, oob := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(8*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return request{}, fmt.Errorf("read from the agent: %w", err)
	}
	fds, err := receivedFDs(oob[:oobn])
	if err == nil {
		var r request
		if r, err = parseRequest(buf[:n], flags, fds); err == nil {
			return r, nil
		}
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	return request{}, fmt.Errorf("the agent does not speak ZDS: %w", err)
}

func parseRequest(msg []byte, flags int, fds []int) (request, error) {
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return request{}, fmt.Errorf("the message is too long or has too many file descriptors (flags %#x)", flags)
	}
	var m zdsapi.WorkloadRequest
	if err := proto.Unmarshal(msg, &m); err != nil {
		return request{}, err
	}
	var r request
	wantFDs := 0
	switch payload := m.GetPayload().(type) {
	case *zdsapi.WorkloadRequest_Add:
		if payload.Add.GetUid() == "" || payload.Add.GetWorkloadInfo() == nil {
			return request{}, errors.New("an add lacks its uid or its workload_info")
		}
		r.add, wantFDs = payload.Add, 1
	case *zdsapi.WorkloadRequest_Del:
		r.del = payload.Del.GetUid()
	case *zdsapi.WorkloadRequest_Keep:
		r.keep = payload.Keep.GetUid()
	case *zdsapi.WorkloadRequest_SnapshotSent:
		r.snapshotSent = true
	}
	if r.add == nil && r.del == "" && r.keep == "" && !r.snapshotSent {
		return request{}, fmt.Errorf("a request says nothing: %v", &m)
	}
	if len(fds) != wantFDs {
		return request{}, fmt.Errorf("%d file descriptors came with a request that wants %d", len(fds), wantFDs)
	}
	if wantFDs == 1 {
		r.netnsFD = fds[0]
	}
	return r, nil
}

// receivedFDs also returns those before a failure.
func receivedFDs(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		some, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fds, err
		}
		fds = append(fds, some...)
	}
	return fds, nil
}

func closeFD(fd int) error { return os.NewSyscallError("close", unix.Close(fd)) }
