package datapath

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/lb"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Event is one client that got a backend or was refused.
type Event struct {
	Time     time.Time
	Refused  bool           // false: a backend was chosen
	Reason   bpf.DropReason // of the refusal; DropNone without one
	Packets  bool           // on the packet path; false: on the socket path
	Protocol clusterset.Protocol
	Client   netip.AddrPort // the zero value on the socket path, where the client has no address yet
	VIP      netip.AddrPort
	Backend  netip.AddrPort         // the zero value when refused
	Service  clusterset.ServiceName // the zero value when there is none
	Cluster  clusterset.ClusterID   // of the backend; "" when there is none
	Netns    uint64                 // cookie of the client's network namespace; 0 when unknown
	PID      uint32                 // 0 when unknown
	Command  string                 // of that process, cut to 15 bytes
}

// ErrObserved is returned by Observe while another Observe runs.
var ErrObserved = errors.New("another observer is active")

// Observe calls handle for every refusal and for one in rate choices (all choices when rate is 1) until ctx ends; then it
// returns nil. It calls handle from its own goroutine, and events that come faster than handle returns are lost. One
// Observe may run at a time; without one the programs read one number and emit nothing. A process that is killed while it
// observes leaves the programs emitting events until the next Open.
func (d *Datapath) Observe(ctx context.Context, rate uint32, handle func(Event)) error {
	if rate == 0 {
		return errors.New("observe one in 0 choices: the rate must be 1 or more")
	}
	if !d.observing.CompareAndSwap(false, true) {
		return ErrObserved
	}
	defer d.observing.Store(false)
	events, err := d.open(bpf.MapEvents)
	if err != nil {
		return err
	}
	r, err := ringbuf.NewReader(events)
	if err != nil {
		return fmt.Errorf("read map %s: %w", bpf.MapEvents, err)
	}
	defer r.Close()
	if err := discard(r); err != nil {
		return err
	}
	if err := d.setObserve(rate); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { r.Close() })
	defer stop()
	return errors.Join(d.readEvents(r, handle), d.setObserve(0))
}

// discard reads the events that the last observer left in the buffer.
func discard(r *ringbuf.Reader) error {
	r.SetDeadline(time.Now())
	defer r.SetDeadline(time.Time{})
	for {
		if _, err := r.Read(); errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read map %s: %w", bpf.MapEvents, err)
		}
	}
}

// readEvents calls handle for each event until r is closed.
func (d *Datapath) readEvents(r *ringbuf.Reader, handle func(Event)) error {
	// Events carry CLOCK_BOOTTIME, which goes on while a machine is suspended.
	booted := time.Now().Add(-SinceBoot())
	for {
		record, err := r.Read()
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read map %s: %w", bpf.MapEvents, err)
		}
		var e bpf.Event
		if _, err := binary.Decode(record.RawSample, binary.NativeEndian, &e); err != nil {
			return fmt.Errorf("record of map %s, %d bytes: %w", bpf.MapEvents, len(record.RawSample), err)
		}
		handle(d.decodeEvent(e, booted))
	}
}

func (d *Datapath) decodeEvent(e bpf.Event, booted time.Time) Event {
	out := Event{
		Time: booted.Add(time.Duration(e.Time)), Refused: e.Kind == bpf.EventRefused, Reason: e.Reason,
		Packets: e.Path == bpf.PathPacket, Protocol: clusterset.Protocol(e.Proto),
		Client: addrPort(e.Client, e.ClientPort), VIP: addrPort(e.Vip, e.VipPort), Backend: addrPort(e.Backend, e.BackendPort),
		Service: d.serviceName(lb.ServiceID(e.Service)),
		Netns:   e.Netns, PID: e.Pid, Command: text(e.Comm[:]),
	}
	if !out.Refused {
		out.Cluster = d.clusterName(lb.ClusterIndex(e.Cluster))
	}
	return out
}

// addrPort decodes an address and port; the all-zero address becomes the zero value.
func addrPort(a [16]byte, port uint16) netip.AddrPort {
	if a == [16]byte{} {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(bpf.AddrOf(a), port)
}

// serviceName returns the name of a Service, the zero value when the Service was removed.
func (r *Reader) serviceName(id lb.ServiceID) clusterset.ServiceName {
	var s bpf.Service
	if id == 0 || r.maps[bpf.MapServices].Lookup(uint32(id), &s) != nil {
		return clusterset.ServiceName{}
	}
	return decodeService(s)
}

func (r *Reader) clusterName(i lb.ClusterIndex) clusterset.ClusterID {
	var c bpf.Cluster
	if i == 0 || r.maps[bpf.MapClusters].Lookup(uint32(i), &c) != nil {
		return ""
	}
	return decodeCluster(c)
}

// setObserve makes the programs emit one event per rate choices, none when rate is 0.
func (r *Reader) setObserve(rate uint32) error {
	m, err := r.open(bpf.MapSettings)
	if err != nil {
		return err
	}
	var s bpf.Settings
	if err := m.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read map %s: %w", bpf.MapSettings, err)
	}
	if s.Observe == rate {
		return nil
	}
	s.Observe = rate
	if err := m.Update(uint32(0), s, ebpf.UpdateAny); err != nil {
		return fmt.Errorf("write map %s: %w", bpf.MapSettings, err)
	}
	return nil
}
