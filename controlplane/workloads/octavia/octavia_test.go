package octavia_test

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/workloads"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia"
	"github.com/isthmus-net/isthmus/controlplane/workloads/octavia/octaviatest"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

type object = octaviatest.Object

// mine returns a client of the project with the load balancers.
func mine(t *testing.T, f octaviatest.Fake) *octavia.Octavia {
	t.Helper()
	return octavia.New(octavia.Config{Cloud: "mine", File: f.CloudsYAML(t)})
}

// list returns the only load balancer with tags.
func list(t *testing.T, f octaviatest.Fake) workloads.Resource {
	t.Helper()
	all, err := mine(t, f).List(t.Context())
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	return all[0]
}

func TestContract(t *testing.T) {
	f := octaviatest.NewFake(t)
	made := 0
	octaviatest.Contract(t, octaviatest.Cloud{
		Mine: mine(t, f), Strange: octavia.New(octavia.Config{Cloud: "strange", File: f.CloudsYAML(t)}),
		Make: func(_ testing.TB, name string, tags ...string) (string, netip.Addr) {
			made++
			vip := netip.AddrFrom4([4]byte{10, 8, 0, byte(made)})
			return f.Add(object{"name": name, "tags": tags, "vip_address": vip.String()}), vip
		},
		Listen: func(_ testing.TB, balancer, name, protocol string, port int) {
			f.Listen(balancer, object{"name": name, "protocol": protocol, "protocol_port": port})
		},
		Float: func(_ testing.TB, balancer string) netip.Addr {
			f.Float(balancer, "203.0.113.9")
			return netip.MustParseAddr("203.0.113.9")
		},
		Disable: func(_ testing.TB, id string) { f.Set(id, "admin_state_up", false) },
		Delete:  func(_ testing.TB, id string) { f.Remove(id) },
	})
}

// All pages are read. If the cloud fails in any list, the whole list is an error: a VIP never takes the place of a floating IP.
func TestPagesAndFaults(t *testing.T) {
	f := octaviatest.NewFake(t)
	o := mine(t, f)
	for range 5 {
		id := f.Add(object{"tags": []string{"a"}})
		f.Listen(id, object{})
		f.Float(id, "203.0.113.9")
	}
	lists := []string{octaviatest.LoadBalancers, octaviatest.Listeners, octaviatest.FloatingIPs}
	for _, failing := range append(lists, "") {
		f.FailList(failing, http.StatusServiceUnavailable)
		all, err := o.List(t.Context())
		f.FailList(failing, 0)
		if failing == "" && (err != nil || len(all) != 5) || failing != "" && (err == nil || len(all) > 0) {
			t.Errorf("without %q: %d load balancers, %v", failing, len(all), err)
		}
		for _, r := range all {
			if len(r.Listeners) != 1 || fmt.Sprint(r.Addrs) != "[203.0.113.9]" {
				t.Errorf("%+v", r)
			}
		}
	}
}

// A load balancer without tags costs no further requests, and those of other projects do not count for an administrator either.
func TestOnlyThoseThatCanAsk(t *testing.T) {
	f := octaviatest.NewFake(t)
	f.Add(object{})
	f.Add(object{"project_id": "other", "tags": []string{"svc.antreaplus.vmware.com=web"}})
	all, err := mine(t, f).List(t.Context())
	if err != nil || len(all) > 0 || f.Asked(octaviatest.Listeners)+f.Asked(octaviatest.FloatingIPs) > 0 {
		t.Errorf("%+v, %v; %d requests for listeners", all, err, f.Asked(octaviatest.Listeners))
	}
}

func TestAddresses(t *testing.T) {
	more := object{"additional_vips": []object{{"ip_address": "10.2.0.1"}, {"ip_address": "2001:db8::7"}}}
	for name, tc := range map[string]struct {
		balancer object
		floating []string
		want     string
	}{
		"the VIP":                  {object{}, nil, "[10.9.0.1]"},
		"a floating one first":     {object{}, []string{"203.0.113.9"}, "[203.0.113.9]"},
		"the first of several":     {object{}, []string{"203.0.113.9", "203.0.113.10"}, "[203.0.113.10]"},
		"one of each family":       {more, []string{"203.0.113.9"}, "[203.0.113.9 2001:db8::7]"},
		"the VIP before others":    {more, nil, "[10.9.0.1 2001:db8::7]"},
		"none before it is made":   {object{"vip_address": nil}, nil, "[]"},
		"none that cannot be used": {object{"vip_address": "127.0.0.1"}, nil, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			f := octaviatest.NewFake(t)
			tc.balancer["tags"] = []string{"a"}
			id := f.Add(tc.balancer)
			for _, addr := range tc.floating {
				f.Float(id, addr)
			}
			f.Float("another", "203.0.113.1")
			if got := fmt.Sprint(list(t, f).Addrs); got != tc.want {
				t.Errorf("%s; want %s", got, tc.want)
			}
		})
	}
	conformance.Holds(t, "F23")
}

func TestRunning(t *testing.T) {
	for state, want := range map[string]bool{
		"up ACTIVE ONLINE": true, "up ACTIVE DEGRADED": true, "up ACTIVE DRAINING": true, "up ACTIVE NO_MONITOR": true, "up PENDING_UPDATE ONLINE": true,
		"down ACTIVE ONLINE": false, "up ACTIVE ERROR": false, "up ACTIVE OFFLINE": false,
		"up PENDING_CREATE ONLINE": false, "up PENDING_DELETE ONLINE": false, "up ERROR ONLINE": false,
	} {
		f := octaviatest.NewFake(t)
		words := strings.Fields(state)
		f.Add(object{"tags": []string{"a"}, "admin_state_up": words[0] == "up", "provisioning_status": words[1], "operating_status": words[2]})
		if list(t, f).Running != want {
			t.Errorf("%s: want %t", state, want)
		}
	}
}

// Listeners that are disabled, or not made, give no port; their operating status does not count.
func TestListeners(t *testing.T) {
	f := octaviatest.NewFake(t)
	id := f.Add(object{"tags": []string{"a"}})
	f.Add(object{"id": "another"})
	for i, protocol := range []string{"TCP", "HTTP", "HTTPS", "TERMINATED_HTTPS", "PROMETHEUS", "UDP", "SCTP"} {
		f.Listen(id, object{"protocol": protocol, "protocol_port": i + 1, "operating_status": "ERROR"})
	}
	f.Listen(id, object{"protocol_port": 11, "admin_state_up": false})
	f.Listen(id, object{"protocol_port": 12, "provisioning_status": "PENDING_CREATE"})
	f.Listen(id, object{"protocol_port": 13, "provisioning_status": "ERROR"})
	f.Listen(id, object{"protocol_port": 14, "provisioning_status": "PENDING_UPDATE"})
	f.Listen("another", object{"protocol_port": 15})
	listeners := list(t, f).Listeners
	slices.SortFunc(listeners, func(a, b workloads.Listener) int { return cmp.Compare(a.Port, b.Port) })
	const want = "[{ 1 TCP} { 2 TCP} { 3 TCP} { 4 TCP} { 5 TCP} { 6 UDP} { 7 SCTP} { 14 TCP}]"
	if got := fmt.Sprint(listeners); got != want {
		t.Errorf("%s; want %s", got, want)
	}
}

// A cloud without Octavia says so until it has one. A clouds.yaml without the cloud is reported too.
func TestErrorsNameTheCloud(t *testing.T) {
	f := octaviatest.NewFake(t)
	o := mine(t, f)
	f.Withdraw("load-balancer")
	if _, err := o.List(t.Context()); err == nil || !strings.Contains(err.Error(), "cloud mine: the catalog has no load-balancer service (Octavia)") {
		t.Error(err)
	}
	f.Withdraw("")
	if _, err := o.List(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := octavia.New(octavia.Config{Cloud: "nowhere", File: f.CloudsYAML(t)}).List(t.Context()); err == nil || !strings.Contains(err.Error(), "cloud nowhere: read clouds.yaml") {
		t.Error(err)
	}
}
