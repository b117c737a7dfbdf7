package nft

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/flows"
)

// tells exports the connections of one gateway to the other, until the returned function is called.
func (w *testbed) tells(from, to int) (end func() int) {
	w.t.Helper()
	ctx, stop := context.WithCancel(w.t.Context())
	exported := 0
	var group errgroup.Group
	group.Go(func() error {
		return w.gateways[from].ns.Do(func() error {
			return w.gateways[from].Export(ctx, func(f flows.Flow) error {
				exported++
				f.Gateway = "other"
				return w.gateways[to].ns.Do(func() error {
					_, err := w.gateways[to].Import([]flows.Flow{f})
					return err
				})
			})
		})
	})
	return func() int {
		w.t.Helper()
		stop()
		if err := group.Wait(); !errors.Is(err, context.Canceled) {
			w.t.Error(err)
		}
		return exported
	}
}

// knows imports flows, whose backends must exist.
func (b *Balancer) knows(all []flows.Flow) error {
	early, err := b.Import(all)
	if err == nil && len(early) > 0 {
		err = fmt.Errorf("%d flows are early: %s", len(early), early[0])
	}
	return err
}

// eachWay runs a test in its own testbed for each return path that shares connections; returns sets it on VIPs.
func eachWay(t *testing.T, test func(w *testbed, returns func(*desired.VIP))) {
	t.Helper()
	for _, way := range []desired.Return{desired.Routed, desired.SNAT} {
		t.Run(string(way), func(t *testing.T) {
			t.Parallel()
			test(newTestbed(t), func(v *desired.VIP) { v.Return = way })
		})
	}
}

// A backend is added and another one drains before the gateway dies. With exported connections none breaks, whichever end
// sends first and whatever address backends see.
func TestImportedConnectionsContinue(t *testing.T) {
	t.Parallel()
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		w.apply(w.state(returns, each(func(f *desired.Frontend) { f.Backends = f.Backends[:2] })))
		s := w.serve()
		before := w.openStreams(0, 4) // these exist when the export starts
		end := w.tells(0, 1)
		after := w.openStreams(1, 4)
		w.apply(w.state(returns, each(func(f *desired.Frontend) { f.Backends[0].Draining = true })))
		w.poll(func() bool { return w.tracked(1) >= 24 }, "the other gateway does not know all connections")
		if exported := end(); exported < 24 {
			w.t.Errorf("%d of 24 connections exported", exported)
		}
		w.kill(0)
		for family, all := range []streams{before, after} {
			if idle, download, upload := all.broken(s); idle+download+upload > 0 {
				w.t.Errorf("%s: broken are %d idle, %d download, %d upload of 4 each", familyNames[family], idle, download, upload)
			}
		}
	})
}

// endings are ways in which a connection ends. Each returns the error at the other end, or nil for the expected one.
var endings = map[string]func(f *flow, server *served) error{
	"the client closes": func(f *flow, server *served) error {
		return errors.Join(f.Conn.(*net.TCPConn).CloseWrite(), hears(<-server.ended, nil), f.hears(io.EOF))
	},
	"the client resets": func(f *flow, server *served) error {
		return errors.Join(f.Conn.(*net.TCPConn).SetLinger(0), f.Close(), hears(<-server.ended, syscall.ECONNRESET))
	},
	"the backend closes": func(f *flow, server *served) error { return errors.Join(server.CloseWrite(), f.hears(io.EOF)) },
	"the backend resets": func(f *flow, server *served) error {
		return errors.Join(server.SetLinger(0), server.Close(), f.hears(syscall.ECONNRESET))
	},
}

func hears(have, want error) error {
	if !errors.Is(have, want) {
		return fmt.Errorf("the other end gets %q, want %q", fmt.Sprint(have), fmt.Sprint(want))
	}
	return nil
}

func (f *flow) hears(want error) error {
	_, err := f.ReadByte()
	return hears(err, want)
}

// A connection may end with the first packet at the surviving gateway. The other end is notified, whichever it is.
func TestImportedConnectionsEnd(t *testing.T) {
	t.Parallel()
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		w.apply(w.state(returns))
		s := w.serve()
		stop := w.tells(0, 1)
		var all [2]map[string]*flow
		for family := range all {
			all[family] = map[string]*flow{}
			for kind := range endings {
				all[family][kind] = w.open(family, "echo")
			}
		}
		w.poll(func() bool { return w.tracked(1) >= 2*len(endings) }, "the other gateway does not know all connections")
		stop()
		w.kill(0)
		for family, name := range familyNames {
			for kind, f := range all[family] {
				server := s.of(f)
				if err := server.SetReadDeadline(time.Now().Add(patience)); err != nil {
					w.t.Fatal(err)
				}
				if err := endings[kind](f, server); err != nil {
					w.t.Errorf("%s, %s: %v", name, kind, err)
				}
			}
		}
	})
}

// tracked returns the number of connections that a gateway knows.
func (w *testbed) tracked(gateway int) (n int) {
	w.t.Helper()
	in(w.t, w.gateways[gateway].ns, func() error {
		return w.gateways[gateway].list(func(entry) { n++ })
	})
	return n
}

// An imported connection is not exported again, but to a gateway that asks for all, and expires without updates. A packet makes it local.
func TestUnusedImportIsNotExported(t *testing.T) {
	t.Parallel()
	w := newTestbed(t)
	w.apply(w.state())
	w.serve()
	all := w.openStreams(0, 2)
	stop := w.tells(0, 1)
	w.poll(func() bool { return w.tracked(1) >= 6 }, "the other gateway does not know all connections")
	stop()
	exported := func(gateway int) (n int) {
		in(t, w.gateways[gateway].ns, func() error {
			return w.gateways[gateway].all(lasting, false, func(flows.Flow) error { n++; return nil })
		})
		return n
	}
	if n := exported(1); n != 0 {
		t.Errorf("the other gateway exports %d imported connections", n)
	}
	asked := 0
	in(t, w.gateways[1].ns, func() error { return w.gateways[1].All(func(flows.Flow) error { asked++; return nil }) })
	if asked != w.tracked(1) {
		t.Errorf("it sends %d of %d connections if asked for all", asked, w.tracked(1))
	}
	backToBack := w.tells(1, 0)
	for range 3 { // as when a third gateway's announcements extend their lifetime, of which there are events
		in(t, w.gateways[0].ns, func() error {
			return w.gateways[0].All(func(f flows.Flow) error {
				return w.gateways[1].ns.Do(func() error { return w.gateways[1].knows([]flows.Flow{f}) })
			})
		})
	}
	<-time.After(2 * eventTimeout) // the exporter has read the events
	if n := backToBack(); n != 0 {
		t.Errorf("the other gateway exports imported connections %d times when it hears of them again", n)
	}
	in(t, w.gateways[1].ns, func() error {
		return w.gateways[1].list(func(e entry) {
			if e.left > importedLifetime || e.left < importedLifetime-time.Minute {
				t.Errorf("%v lives for %s, want %s", e.original, e.left, importedLifetime)
			}
		})
	})
	w.kill(0)
	for _, f := range all.idle {
		if err := f.echoes(); err != nil {
			t.Error(err)
		}
	}
	if n := exported(1); n < len(all.idle) {
		t.Errorf("after its death the other gateway exports %d connections, want %d at least", n, len(all.idle))
	}
}

// A reply in flight may reach the new gateway before any request. A UDP flow is imported with a full export, and not
// exported again before it is used.
func TestRepliesInFlight(t *testing.T) {
	t.Parallel()
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		const port = 7777
		w.apply(w.state(returns))
		w.serve()
		for family := range familyNames {
			if _, err := w.ask(family, port); err != nil {
				w.t.Fatal(err)
			}
		}
		all := func(gateway int) (all []flows.Flow) {
			in(w.t, w.gateways[gateway].ns, func() error {
				return w.gateways[gateway].All(func(f flows.Flow) error {
					all = append(all, f)
					return nil
				})
			})
			return all
		}
		for range 2 { // the second export includes them
			in(w.t, w.gateways[1].ns, func() error { return w.gateways[1].knows(all(0)) })
		}
		if back := all(1); len(back) > 0 {
			w.t.Errorf("the other gateway exports %d imported flows", len(back))
		}
		w.steerServers(1)
		for family, name := range familyNames {
			if _, err := w.ask(family, port); err != nil {
				w.t.Errorf("%s: %v", name, err)
			}
		}
		if back := all(1); len(back) != len(familyNames) {
			w.t.Errorf("the other gateway exports %d of %d flows through it", len(back), len(familyNames))
		}
	})
}

// A connection that moved to another gateway may return after more bytes than a TCP window to its first gateway, which
// did not see them.
func TestConnectionsReturn(t *testing.T) {
	t.Parallel()
	eachWay(t, func(w *testbed, returns func(*desired.VIP)) {
		s := w.serve()
		w.applySlots(w.state(returns))
		stop := w.tells(0, 1)
		all := w.openStreams(0, 2)
		w.poll(func() bool { return w.tracked(1) >= 6 }, "the other gateway does not know all connections")
		stop()
		w.steer(1)
		for _, f := range all.upload {
			if err := f.uploadsMuch(s, 400); err != nil { // 4 MB; the windows are 64 KB
				w.t.Fatal(err)
			}
		}
		w.steer(0)
		if idle, download, upload := all.broken(s); idle+download+upload > 0 {
			w.t.Errorf("broken are %d idle, %d download, %d upload of 2 each", idle, download, upload)
		}
	})
}
