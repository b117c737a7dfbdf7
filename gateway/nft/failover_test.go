package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// kill cuts a gateway's cables, and sends all packets through the other one.
func (w *testbed) kill(dead int) {
	w.t.Helper()
	w.cut(dead)
	w.steer(1 - dead)
}

// cut cuts a gateway's cables.
func (w *testbed) cut(dead int) {
	w.t.Helper()
	for _, side := range []int{50, 60} {
		near, _ := link(0, side, dead)
		in(w.t, w.gateways[dead].ns, func() error {
			l, err := netlink.LinkByName(netlab.DeviceName(near))
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(l)
		})
	}
}

// streams are connections of each kind.
type streams struct{ idle, download, upload []*flow }

func (w *testbed) openStreams(family, n int) (f streams) {
	w.t.Helper()
	for range n {
		f.idle = append(f.idle, w.open(family, "echo"))
		f.download = append(f.download, w.open(family, "download"))
		f.upload = append(f.upload, w.open(family, "upload"))
	}
	return f
}

// broken returns the number of connections of each kind that do not continue.
func (f streams) broken(s *servers) (idle, download, upload int) {
	for _, c := range f.idle {
		if c.echoes() != nil {
			idle++
		}
	}
	for _, c := range f.download {
		if c.downloads() != nil {
			download++
		}
	}
	for _, c := range f.upload {
		if c.uploads(s) != nil {
			upload++
		}
	}
	return idle, download, upload
}

// downloads reads until data arrives that the server sent from now on.
func (f *flow) downloads() error {
	if err := f.wait(); err != nil {
		return err
	}
	for now := time.Now().UnixNano(); ; {
		line, err := f.ReadString('\n')
		if err != nil {
			return err
		}
		if sent, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64); err != nil || sent > now {
			return err
		}
	}
}

// uploads waits until the server has data that was sent from now on.
func (f *flow) uploads(s *servers) error { return f.uploadsMuch(s, 1) }

// uploadsMuch does the same, several times over.
func (f *flow) uploadsMuch(s *servers, times int) error {
	if err := f.wait(); err != nil {
		return err
	}
	client, err := netip.ParseAddrPort(f.shown)
	if err != nil {
		return err
	}
	got := s.uploadOf(client.String())
	const size = 10 << 10
	for range times {
		if _, err := f.Write(make([]byte, size)); err != nil {
			return err
		}
		for sum := 0; sum < size; {
			select {
			case n := <-got:
				sum += n
			case <-time.After(patience):
				return errors.New("the server does not get it")
			}
		}
	}
	return nil
}

// When a gateway dies, every connection continues at the other one, whichever end sends first.
func TestFailover(t *testing.T) {
	t.Parallel()
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		w := newTestbed(t)
		w.apply(w.state(func(v *desired.VIP) { v.Return = way }))
		s := w.serve()
		var all [2]streams
		for family := range familyNames {
			all[family] = w.openStreams(family, 5)
		}
		w.kill(0)
		for family, name := range familyNames {
			if way == desired.SNAT {
				// The client has to send first; packets of the backend before that get no answer.
				const why = "drop a reply of a backend without its connection"
				w.poll(func() bool { return w.ruleCounter(1, why) > 0 }, "no packet of a download was dropped")
				for _, f := range all[family].download {
					fmt.Fprintln(f, "go on")
				}
			}
			if idle, download, upload := all[family].broken(s); idle+download+upload > 0 {
				t.Errorf("%s, %s: broken are %d idle, %d download, %d upload of 5 each", way, name, idle, download, upload)
			}
		}
	}
}

// A backend is added before the gateway dies, so that some clients now hash to another one. The backends of downloads
// identify those before their clients send anything. Of the rest, connections whose slots changed break, and learn it at
// once.
func TestFailoverAfterChange(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	less := each(func(f *desired.Frontend) { f.Backends = f.Backends[:2] })
	w.apply(w.state(less))
	w.serve()
	var all streams
	for i := range uint16(16) { // the hash is of these ports, so that the same connections break each time
		all.idle = append(all.idle, w.openFrom(netip.AddrPortFrom(clientAddrs[0], 20_000+i), 0, "echo"))
		all.download = append(all.download, w.openFrom(netip.AddrPortFrom(clientAddrs[0], 21_000+i), 0, "download"))
	}
	w.apply(w.state())
	w.cut(0)
	known := w.tracked(1)
	w.steerServers(1)
	w.poll(func() bool { return w.tracked(1) >= known+len(all.download) }, "not every backend of a download sent a packet")
	w.steerClient(1)
	for _, f := range all.download {
		if err := f.downloads(); err != nil {
			t.Errorf("a download is broken: %v", err)
		}
	}
	reset := 0
	for _, f := range all.idle {
		switch err := f.echoes(); {
		case errors.Is(err, syscall.ECONNRESET):
			reset++
		case err != nil:
			t.Errorf("a connection whose slot changed is not reset: %v", err)
		}
	}
	// Two of four backends are new, so every other slot has changed.
	if reset < 3 || reset > 13 {
		t.Errorf("%d of %d idle connections are broken, want about half", reset, len(all.idle))
	}
}

// A packet of a backend with several frontends is dropped. It never leaves with the backend's address.
func TestReturnWithoutState(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state(func(v *desired.VIP) {
		twice := v.Frontends[0]
		twice.Port = 81
		v.Frontends = append(v.Frontends, twice)
	}))
	w.serve()
	w.open(0, "download")
	seen := w.listen()
	w.kill(0)
	w.poll(func() bool { return w.ruleCounter(1, "drop a packet of a backend with several frontends") > 0 }, "no packet of the download was dropped")
	for _, source := range seen() {
		if backendNets[0].Contains(source) {
			t.Errorf("the client got a packet from %v", source)
		}
	}
}
