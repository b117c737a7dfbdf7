package datapath

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/tools/netlab"
)

// positions returns how many programs of others are before and after ours on one side of a pod's device.
func positions(t *testing.T, p pod, at ebpf.AttachType, theirs ...*ebpf.Program) (before, after int) {
	t.Helper()
	q, err := link.QueryPrograms(link.QueryOptions{Target: p.host.Attrs().Index, Attach: at})
	if err != nil {
		t.Fatal(err)
	}
	met := 0
	for _, a := range q.Programs {
		their := slices.ContainsFunc(theirs, func(prog *ebpf.Program) bool {
			id, err := bpf.ProgramID(prog)
			return err == nil && id == a.ID
		})
		switch {
		case !their:
			met++
		case met == 0:
			before++
		default:
			after++
		}
	}
	if met != 1 {
		t.Fatalf("%d programs of ours at %v", met, at)
	}
	return before, after
}

// Findings name programs that displace ours. A restart restores the position, and another order moves our programs. They
// see both directions of every packet meanwhile.
func TestOrderIsKept(t *testing.T) {
	netlab.Privileged(t)
	if err := haveTCX(); err != nil {
		netlab.Skip(t, fmt.Sprint("no TCX: ", err))
	}
	cfg, p := testConfig(t), newPod(t, 1)
	in, out := passing(t), passing(t)
	var links []link.Link
	t.Cleanup(func() {
		for _, l := range links {
			_ = l.Close()
		}
	})
	put := func(t *testing.T, prog *ebpf.Program, at ebpf.AttachType, anchor link.Anchor) {
		t.Helper()
		l, err := link.AttachTCX(link.TCXOptions{Interface: p.host.Attrs().Index, Program: prog, Attach: at, Anchor: anchor})
		if err != nil {
			t.Fatal(err)
		}
		links = append(links, l)
	}
	for _, step := range []struct {
		name      string
		order     Order
		displaced bool // by another program, while ours run
		// The number of other programs before ours on ingress and after ours on egress, in the end.
		before, after int
	}{
		{"ours alone, then displaced", OrderNear, true, 1, 1},
		{"a restart takes the place again", OrderNear, false, 0, 0},
		{"another order", OrderFar, false, 1, 1},
		{"and back", OrderNear, false, 0, 0},
	} {
		t.Run(step.name, func(t *testing.T) {
			cfg := cfg
			cfg.Order = step.order
			d := openPackets(t, cfg, withPackets(currentVersion(t), false, 0))
			before := runs(t, d)
			asked := uint64(0)
			await(t, "attached", func() bool {
				if len(links) > 0 {
					p.ask(t)
					asked++
				}
				return cmp.Equal(on(d), []string{"pod.1"}) && runsProgram(t, cfg, d, p)
			})
			if after := runs(t, d); after[countIn] < before[countIn]+asked || after[countOut] < before[countOut]+asked {
				t.Errorf("%v runs before and %v after %d questions: some were not seen", before, after, asked)
			}
			if step.displaced {
				if names := findingNames(t, d); len(names) > 0 {
					t.Errorf("found %v before anybody came", names)
				}
				put(t, in, ebpf.AttachTCXIngress, link.Head())
				put(t, out, ebpf.AttachTCXEgress, link.Tail())
			}
			b, _ := positions(t, p, ebpf.AttachTCXIngress, in)
			_, a := positions(t, p, ebpf.AttachTCXEgress, out)
			if b != step.before || a != step.after {
				t.Errorf("%d of others before ours on ingress and %d after it on egress, want %d and %d", b, a, step.before, step.after)
			}
			found, err := d.examine()
			if err != nil {
				t.Fatal(err)
			}
			if !step.displaced {
				if len(found) > 0 {
					t.Errorf("found %v", found)
				}
				return
			}
			id, err := bpf.ProgramID(in)
			if err != nil {
				t.Fatal(err)
			}
			if len(found) != 2 || found[0].Name != "order" || found[1].Name != "order" ||
				!strings.Contains(found[0].Message, fmt.Sprintf("program %d", id)) || !strings.Contains(found[0].Message, "before "+hookIn+" on pod.1") {
				t.Errorf("found %v, want both sides of pod.1 and program %d on ingress", found, id)
			}
		})
	}
}

// clsact filters run after TCX programs, where ours should be last. Without TCX, filters have priorities.
func TestFiltersBetweenAreNamed(t *testing.T) {
	bothWays(t, func(t *testing.T, noTCX bool) {
		t.Helper()
		cfg, p := testConfig(t), newPod(t, 1)
		d := openPackets(t, cfg, withPackets(currentVersion(t), noTCX, 0))
		await(t, "attached", func() bool { return cmp.Equal(on(d), []string{"pod.1"}) })
		neighbour, index := passing(t), p.host.Attrs().Index
		err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
		}})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatal(err)
		}
		for _, c := range []struct {
			name     string
			parent   uint32
			priority uint16
			with     map[bool]bool // whether it is between, by noTCX
		}{
			{"first on ingress", netlink.HANDLE_MIN_INGRESS, 1, map[bool]bool{true: true}},
			{"later on ingress", netlink.HANDLE_MIN_INGRESS, 100, nil},
			{"first on egress", netlink.HANDLE_MIN_EGRESS, 1, map[bool]bool{false: true}},
			{"last on egress", netlink.HANDLE_MIN_EGRESS, 0xFFFF, map[bool]bool{false: true, true: true}},
		} {
			t.Run(c.name, func(t *testing.T) {
				f := &netlink.BpfFilter{
					FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: c.parent, Handle: 1, Priority: c.priority, Protocol: unix.ETH_P_ALL},
					Fd:          neighbour.FD(), Name: "neighbour", DirectAction: true,
				}
				if err := netlink.FilterAdd(f); err != nil {
					t.Fatal(err)
				}
				found, err := d.examine()
				if err != nil || len(found) > 0 != c.with[noTCX] {
					t.Errorf("found %v, %v, want something: %v", found, err, c.with[noTCX])
				}
				for _, f := range found {
					if f.Name != "order" || !strings.Contains(f.Message, fmt.Sprintf("the clsact filter neighbour of priority %d", c.priority)) {
						t.Errorf("found %+v", f)
					}
				}
				if err := netlink.FilterDel(f); err != nil {
					t.Fatal(err)
				}
				if names := findingNames(t, d); len(names) > 0 {
					t.Errorf("found %v after it went", names)
				}
			})
		}
	})
}
