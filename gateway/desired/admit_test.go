package desired

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// frontend returns a frontend with one backend, whose port tells versions of it apart.
func frontend(service string, port, backend uint16) Frontend {
	return Frontend{Service: service, Protocol: "TCP", Port: port, Backends: []Backend{{Addr: netip.MustParseAddr("10.1.0.5"), Port: backend, Weight: 1}}}
}

// vipsOf returns a state with the VIPs 198.51.100.1 and following.
func vipsOf(frontends ...[]Frontend) *State {
	s := &State{Cluster: "a", Group: "edge", Balancer: NFTables}
	for i, f := range frontends {
		s.VIPs = append(s.VIPs, VIP{Addr: netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), Announce: ByNone, Return: SNAT, Frontends: f})
	}
	return s
}

// text lists the frontends of a state as VIP:port=service@backend.
func (s *State) text() string {
	var all []string
	for _, v := range s.VIPs {
		for _, f := range v.Frontends {
			all = append(all, fmt.Sprintf("%d:%d=%s@%d", v.Addr.As4()[3], f.Port, f.Service, f.Backends[0].Port))
		}
	}
	return strings.Join(all, " ")
}

// A Service that is wrong stays as it is, or is left out, at all its VIPs. All others are applied.
func TestAdmit(t *testing.T) {
	t.Parallel()
	type list = []Frontend
	invalid := frontend("bad", 80, 0)
	for name, tc := range map[string]struct {
		state, have *State
		want        string
		faults      string
	}{
		"all is well": {state: vipsOf(list{frontend("a", 80, 1)}), want: "1:80=a@1"},
		"a new Service is left out at all its VIPs": {
			state: vipsOf(list{frontend("a", 80, 2), frontend("bad", 81, 2)}, list{invalid}), have: vipsOf(list{frontend("a", 80, 1)}),
			want: "1:80=a@2", faults: "bad: vips[1].frontends[0].backends[0].port: is missing",
		},
		"a Service that is served stays as it is": {
			state: vipsOf(list{invalid, frontend("a", 443, 2)}, list{frontend("bad", 80, 2)}), have: vipsOf(list{frontend("bad", 80, 1), frontend("bad", 81, 1), frontend("a", 443, 1)}, list{frontend("bad", 80, 1)}),
			want: "1:80=bad@1 1:81=bad@1 1:443=a@2 2:80=bad@1", faults: "bad: vips[0].frontends[0].backends[0].port: is missing",
		},
		"it loses an address that it is not given, and a port that another Service has": {
			state: vipsOf(list{invalid, frontend("a", 443, 2)}, nil), have: vipsOf(list{frontend("bad", 443, 1), frontend("bad", 444, 1)}, list{frontend("bad", 80, 1)}),
			want: "1:443=a@2 1:444=bad@1", faults: "bad: vips[0].frontends[0].backends[0].port: is missing",
		},
		"of two Services with one port, the first has it": {
			state: vipsOf(list{frontend("a", 80, 2), frontend("b", 80, 2), frontend("c", 80, 2)}),
			want:  "1:80=a@2", faults: "b: vips[0].frontends[1].port: TCP 80 of 198.51.100.1 already belongs to a; c: vips[0].frontends[2].port: TCP 80 of 198.51.100.1 already belongs to a",
		},
		"of two Services with one port, the one that has it keeps it": {
			state: vipsOf(list{frontend("a", 80, 2), frontend("b", 80, 2), frontend("c", 80, 2)}), have: vipsOf(list{frontend("b", 80, 1)}),
			want: "1:80=b@2", faults: "a: vips[0].frontends[0].port: TCP 80 of 198.51.100.1 already belongs to b; c: vips[0].frontends[2].port: TCP 80 of 198.51.100.1 already belongs to b",
		},
		"a VIP that cannot be announced": {
			state: func() *State {
				s := vipsOf(list{frontend("a", 80, 2)}, list{frontend("b", 80, 2)})
				s.VIPs[1].Announce = ByBGP
				return s
			}(),
			have: vipsOf(nil, list{frontend("b", 80, 1)}),
			want: "1:80=a@2", faults: `b: vips[1].announce: is "bgp", but bgp is missing`,
		},
		"a VIP without Services that cannot be announced": {
			state: func() *State {
				s := vipsOf(list{frontend("a", 80, 2)}, nil)
				s.VIPs[1].Announce = ByBGP
				return s
			}(),
			want: "1:80=a@2",
		},
		"a Service with too many backends": {
			state: vipsOf(list{frontend("a", 80, 2), many("bad", MaxBackends+1, 0)}),
			want:  "1:80=a@2", faults: "bad: has 32769 backends, over all ports; 32768 are possible",
		},
		"a Service with too many source ranges": {
			state: vipsOf(list{frontend("a", 80, 2), many("bad", 1, MaxSources+1)}),
			want:  "1:80=a@2", faults: "bad: has 65537 source ranges, over all ports; 65536 are possible",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			have, faults := tc.state.Admit(tc.have)
			if diff := cmp.Diff(tc.want, have.text()); diff != "" {
				t.Errorf("admitted (-want +have):\n%s", diff)
			}
			var texts []string
			for _, f := range faults {
				texts = append(texts, f.Services[0]+": "+Faults{f}.Error())
			}
			if diff := cmp.Diff(tc.faults, strings.Join(texts, "; ")); diff != "" {
				t.Errorf("faults (-want +have):\n%s", diff)
			}
		})
	}
}

// many returns a frontend at port 8000 with many backends and sources.
func many(service string, backends, sources int) Frontend {
	f := Frontend{Service: service, Protocol: "TCP", Port: 8000}
	number := func(first byte, i int) netip.Addr {
		b := binary.BigEndian.AppendUint32(nil, uint32(i))
		return netip.AddrFrom4([4]byte{first, b[1], b[2], b[3]})
	}
	for i := range backends {
		f.Backends = append(f.Backends, Backend{Addr: number(10, i), Port: 8080, Weight: 1})
	}
	for i := range sources {
		f.Sources = append(f.Sources, netip.PrefixFrom(number(20, i), 32))
	}
	return f
}

// A fault of the gateway itself is one of the whole state.
func TestAdmitWholeState(t *testing.T) {
	t.Parallel()
	s := vipsOf([]Frontend{frontend("a", 80, 0)})
	s.Group = ""
	if have, faults := s.Admit(nil); len(have.VIPs) > 0 || len(faults) != 1 || faults[0].Field != "group" {
		t.Errorf("%+v, %v", have, faults)
	}
}

// However many Services there are, those that ask for little fit into a request, and the request is no larger than it may be.
func TestAdmitFitsIntoARequest(t *testing.T) {
	t.Parallel()
	s := vipsOf([]Frontend{frontend("small", 80, 1)})
	for i := range 20 {
		f := many(fmt.Sprint("large-", i), MaxBackends, 0)
		for j := range f.Backends {
			f.Backends[j].Draining, f.Backends[j].Weight = true, 65535
		}
		s.VIPs = append(s.VIPs, vipsOf(nil, []Frontend{f}).VIPs[1])
		s.VIPs[i+1].Addr = netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 2)})
	}
	have, faults := s.Admit(nil)
	if have.owner(s.VIPs[0].Addr, l4{"TCP", 80}) != "small" || len(faults) == 0 || len(faults) > 16 {
		t.Errorf("%d VIPs are left; faults %v", len(have.VIPs), faults)
	}
	r := NewRequest(1, have)
	if n := len(r.JSON()); n > 16<<20 {
		t.Errorf("the request has %d bytes", n)
	}
}

// FuzzAdmit draws the Services of a tenant beside those of another, the bystander, whose own are right. No Service of the
// tenant changes what the bystander is served with, the result is valid, and each Service that is not served as asked has one
// fault.
func FuzzAdmit(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x50\x00\x00\x01\x01"), []byte{})
	f.Add([]byte("\x01\x51\x00\x50\x04\x01\x01\x02\x00\x01\x00\x50\x00\x01\x1f\x90"), []byte("\x00\x00\x00\x51\x00\x00\x01\x01"))
	f.Fuzz(func(t *testing.T, now, before []byte) {
		now, before = now[:min(len(now), 800)], before[:min(len(before), 800)]
		bystander := func(version uint16) [][]Frontend {
			return [][]Frontend{{frontend("bystander", 80, version), frontend("bystander", 443, version)}, {frontend("bystander", 80, version)}, nil}
		}
		have, _ := vipsOf(hostile(bystander(1), before)...).Admit(vipsOf(bystander(1)...))
		state := vipsOf(hostile(bystander(2), now)...)
		next, faults := state.Admit(&have)
		if faults := next.Validate(); len(faults) > 0 {
			t.Errorf("the result is invalid: %v", faults)
		}
		own := next.Without(Faults{{Services: []string{"tenant-0", "tenant-1", "tenant-2", ""}}}, nil)
		want := vipsOf(bystander(2)...).text()
		if diff := cmp.Diff(want, own.text()); diff != "" {
			t.Errorf("the bystander (-want +have):\n%s\nstate %s\nbefore %s", diff, state.text(), have.text())
		}
		for i, fault := range faults {
			if len(fault.Services) != 1 || fault.Services[0] == "bystander" || slices.ContainsFunc(faults[:i], func(f Fault) bool { return f.Services[0] == fault.Services[0] }) {
				t.Errorf("fault %v of %v", fault.Services, faults)
			}
		}
		if again, more := next.Admit(&have); len(more) > 0 || !reflect.DeepEqual(again, next) {
			t.Errorf("admitted again: %+v, %v", again, more)
		}
	})
}

// hostile adds a frontend of a tenant for each eight bytes of b, before or behind those of the others.
func hostile(vips [][]Frontend, b []byte) [][]Frontend {
	for ; len(b) >= 8; b = b[8:] {
		f := frontend([]string{"tenant-0", "tenant-1", "tenant-2", ""}[b[1]%4], binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint16(b[6:]))
		f.Protocol = []string{"TCP", "TCP", "TCP", "UDP", "SCTP", ""}[b[4]%6]
		switch b[5] % 8 {
		case 1:
			f.Backends[0].Addr = netip.MustParseAddr("fd00::1")
		case 2:
			f.Backends = append(f.Backends, f.Backends[0])
		case 3:
			f.Backends[0].Addr = netip.Addr{}
		case 4:
			f.Affinity = -1
		case 5:
			f.Sources = []netip.Prefix{{}}
		}
		at := &vips[int(b[0])%len(vips)]
		if b[0]&0x80 != 0 {
			*at = append([]Frontend{f}, *at...)
		} else {
			*at = append(*at, f)
		}
	}
	return vips
}
