package nova_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/controlplane/workloads/nova"
	"github.com/isthmus-net/isthmus/controlplane/workloads/nova/novatest"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

type object = novatest.Object

func TestContract(t *testing.T) {
	f := novatest.NewFake(t)
	file := f.CloudsYAML(t)
	novatest.Contract(t, novatest.Cloud{
		Mine: nova.New(nova.Config{Cloud: "mine", File: file}), Strange: nova.New(nova.Config{Cloud: "strange", File: file}),
		Boot: func(_ testing.TB, name string, metadata map[string]string, tags ...string) string {
			return f.Add(object{"name": name, "metadata": metadata, "tags": tags})
		},
		Stop:   func(_ testing.TB, id string) { f.Set(id, "status", "SHUTOFF") },
		Delete: func(_ testing.TB, id string) { f.Remove(id) },
	})
}

// All pages are read. If the cloud fails between two pages, the list is an error.
func TestPagesAndFaults(t *testing.T) {
	f := novatest.NewFake(t)
	n := nova.New(nova.Config{Cloud: "mine", File: f.CloudsYAML(t)})
	for range 5 {
		f.Add(nil)
	}
	for _, status := range []int{0, http.StatusServiceUnavailable, 0, http.StatusForbidden, 0} {
		f.Fail(status)
		all, err := n.List(t.Context())
		if status == 0 && (err != nil || len(all) != 5) || status != 0 && (err == nil || len(all) > 0) {
			t.Errorf("with status %d: %d servers, %v", status, len(all), err)
		}
	}
}

func TestAddresses(t *testing.T) {
	addr := func(kind, a string) object { return object{"addr": a, "OS-EXT-IPS:type": kind} }
	two := object{
		"b": []object{addr("fixed", "10.2.0.1"), addr("floating", "203.0.113.9")},
		"a": []object{addr("fixed", "10.1.0.1"), addr("fixed", "fd00::1"), addr("fixed", "fe80::1")},
	}
	for name, tc := range map[string]struct {
		network string
		server  object
		want    string
	}{
		"a floating one first":   {"", object{"addresses": two}, "[203.0.113.9 fd00::1]"},
		"of one network":         {"a", object{"addresses": two}, "[10.1.0.1 fd00::1]"},
		"of another":             {"b", object{"addresses": two}, "[203.0.113.9]"},
		"what the server says":   {"", object{"addresses": two, "accessIPv4": "198.51.100.4"}, "[198.51.100.4 fd00::1]"},
		"none before it is made": {"", object{"addresses": object{}, "status": "BUILD"}, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			f := novatest.NewFake(t)
			f.Add(tc.server)
			all, err := nova.New(nova.Config{Cloud: "mine", File: f.CloudsYAML(t), Network: tc.network}).List(t.Context())
			if err != nil || len(all) != 1 || fmt.Sprint(all[0].Addrs) != tc.want {
				t.Errorf("%+v, %v; want %s", all, err, tc.want)
			}
		})
	}
	conformance.Holds(t, "F22")
}

func TestErrorsNameTheCloud(t *testing.T) {
	f := novatest.NewFake(t)
	if _, err := nova.New(nova.Config{Cloud: "nowhere", File: f.CloudsYAML(t)}).List(t.Context()); err == nil || !strings.Contains(err.Error(), "cloud nowhere: read clouds.yaml") {
		t.Error(err)
	}
}
