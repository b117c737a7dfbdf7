package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Connection is a flow that the packet path translates.
type Connection struct {
	Protocol             clusterset.Protocol
	Client, VIP, Backend netip.AddrPort
	Service              clusterset.ServiceName
	Cluster              clusterset.ClusterID // of the backend
	State                string               // "opening", "answered", "open", "half", "closing" or "closed"
	Fast                 bool                 // on the fast path, past the node's routing and netfilter
	Silent               time.Duration        // since its last packet, in whole seconds
}

// connStates are the names of the states of a flow.
var connStates = map[bpf.ConnState]string{
	bpf.ConnOpening: "opening", bpf.ConnAnswered: "answered", bpf.ConnOpen: "open",
	bpf.ConnHalf: "half", bpf.ConnClosing: "closing", bpf.ConnClosed: "closed",
}

// Connections returns up to limit flows of the packet path, in no order, and none without a packet path. Some of them
// may have ended: an ended flow is evicted when the map needs its entry.
func (r *Reader) Connections(limit int) (found []Connection, err error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	for _, name := range []string{bpf.MapFlows, bpf.MapUDPFlows, bpf.MapHandshakes} {
		if found, err = r.appendConnections(found, limit, name, time.Duration(now.Nano())); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// appendConnections appends the flows of one map, until there are limit.
func (r *Reader) appendConnections(found []Connection, limit int, name string, now time.Duration) ([]Connection, error) {
	m := r.maps[name]
	if m == nil {
		return found, nil
	}
	var cursor ebpf.MapBatchCursor
	keys, values := make([]bpf.ConnKey, chunk), make([]bpf.Conn, chunk)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			if len(found) == limit {
				return found, nil
			}
			if keys[i].Reply == 0 && values[i].Flags&bpf.ConnBack == 0 { // the other direction is an entry of its own
				found = append(found, r.decodeConnection(keys[i], values[i], now))
			}
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return found, nil // the end
		}
		if err != nil {
			return nil, fmt.Errorf("read map %s: %w", m, err)
		}
	}
}

func (r *Reader) decodeConnection(k bpf.ConnKey, c bpf.Conn, now time.Duration) Connection {
	state, ok := connStates[c.State]
	if !ok {
		state = fmt.Sprintf("state(%d)", c.State)
	}
	return Connection{
		Protocol: clusterset.Protocol(k.Proto), Client: addrPort(k.Client, k.ClientPort), VIP: addrPort(k.Server, k.ServerPort),
		Backend: addrPort(c.Addr, c.ServerPort), Service: r.serviceName(lb.ServiceID(c.Service)), Cluster: r.clusterName(lb.ClusterIndex(c.Cluster)),
		State: state, Fast: c.Flags&bpf.ConnFast != 0, Silent: max(0, now-time.Duration(c.Seen)).Truncate(time.Second),
	}
}
