package agent

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// services is a request with Services such as a@1, whose backend has port 1, at the address one.
func services(generation uint64, all ...string) desired.Request {
	r := request(generation, one)
	for i, text := range all {
		var port uint16
		name, version, _ := strings.Cut(text, "@")
		_, _ = fmt.Sscan(version, &port)
		r.State.VIPs[0].Frontends = append(r.State.VIPs[0].Frontends, desired.Frontend{
			Service: name, Protocol: "TCP", Port: uint16(80 + i), Backends: []desired.Backend{{Addr: two, Port: port, Weight: 1}},
		})
	}
	return desired.NewRequest(generation, r.State)
}

// wantServed checks what all components serve, and which Services are refused.
func wantServed(t *testing.T, step string, a *Agent, m *machine, served string, refused ...string) {
	t.Helper()
	for _, name := range []string{desired.ComponentBalancer, desired.ComponentBGP, desired.ComponentVRRP} {
		if diff := cmp.Diff(served, strings.TrimSpace(m.states[name])); diff != "" {
			t.Errorf("%s: %s (-want +have):\n%s", step, name, diff)
		}
	}
	var have []string
	for _, f := range a.Stats().Status.Refused {
		have = append(have, f.Services...)
	}
	if slices.Sort(have); !slices.Equal(have, refused) {
		t.Errorf("%s: %q are refused, want %q", step, have, refused)
	}
	if s := a.Stats(); !s.Ready || len(s.Status.Drift) > 0 {
		t.Errorf("%s: %+v", step, s)
	}
}

// A Service that a component has no room for stays as it was, and a new one is left out: at all components, and after a
// restart. All others are applied. It is applied as soon as there is room.
func TestServiceWithoutRoom(t *testing.T) {
	for _, component := range []string{desired.ComponentBalancer, desired.ComponentBGP, desired.ComponentVRRP} {
		m, path := newMachine(), statePath(t)
		a := newAgent(t, m, path)
		must(t, a, services(1, "a@1", "grows@1"))
		m.noRoom[component] = []string{"grows@2", "new@2"}
		r := services(2, "a@2", "grows@2", "new@2")
		must(t, a, r)
		wantServed(t, component+" has no room", a, m, "a@2 grows@1", "grows", "new")
		if s := a.Stats().Status; s.Hash != r.Hash || s.Generation != 2 {
			t.Errorf("%s: the status is of another state: %+v", component, s)
		}
		must(t, a, r) // again
		a.check(t.Context())
		wantServed(t, component+" still has no room", a, m, "a@2 grows@1", "grows", "new")

		next := newMachine()
		next.noRoom = m.noRoom
		b := newAgent(t, next, path)
		b.check(t.Context())
		wantServed(t, "a successor", b, next, "a@2 grows@1")
		must(t, b, services(3, "a@3", "grows@2", "new@2"))
		wantServed(t, "a successor hears from the controller", b, next, "a@3 grows@1", "grows", "new")

		delete(next.noRoom, component)
		b.check(t.Context())
		wantServed(t, "there is room", b, next, "a@3 grows@2 new@2")
		last := newMachine()
		c := newAgent(t, last, path)
		c.check(t.Context())
		wantServed(t, "its successor", c, last, "a@3 grows@2 new@2")
	}
}

// A gateway that starts with less room than it had leaves out what does not fit, until it does.
func TestLessRoomAfterARestart(t *testing.T) {
	path := statePath(t)
	must(t, newAgent(t, newMachine(), path), services(1, "a@1", "large@1"))
	m := newMachine()
	m.noRoom[desired.ComponentBalancer] = []string{"large@1"}
	a := newAgent(t, m, path)
	a.check(t.Context())
	wantServed(t, "less room", a, m, "a@1", "large")
	delete(m.noRoom, desired.ComponentBalancer)
	a.check(t.Context())
	wantServed(t, "room again", a, m, "a@1 large@1")
}

// A disk that is full keeps what is served, with a Service that is refused, too.
func TestRefusedServiceOnAFullDisk(t *testing.T) {
	m, path := newMachine(), statePath(t)
	a := newAgent(t, m, path)
	must(t, a, services(1, "a@1", "grows@1"))
	m.noRoom[desired.ComponentBalancer] = []string{"grows@2"}
	a.store.syncNames = func(string) error { return os.ErrPermission }
	if err := a.Reconfigure(t.Context(), services(2, "a@2", "grows@2")); err == nil {
		t.Error("no error")
	}
	wantServed(t, "a disk that is full", a, m, "a@1 grows@1")
}

// A request with an invalid Service, as a faulty controller might send, is applied without it. The answer names it in a field
// that older controllers ignore.
func TestAnswerWithARefusedService(t *testing.T) {
	e := serveLocally(t)
	c := e.client(e.source(certs.Controller, e.ca).Client("gw-1"))
	code, answer, err := ask(t, c, "POST", "/v1/reconfigure", encode(t, services(1, "a@1", "bad@0")))
	if err != nil || code != 200 {
		t.Fatalf("%d %s, %v", code, answer, err)
	}
	var status desired.Status
	if err := json.Unmarshal([]byte(answer), &status); err != nil {
		t.Fatal(err)
	}
	want := []desired.Fault{{Component: desired.ComponentRequest, Field: "vips[0].frontends[1].backends[0].port", Services: []string{"bad"}, Message: "is missing"}}
	if diff := cmp.Diff(want, status.Refused); diff != "" || status.Generation != 1 {
		t.Errorf("generation %d, refused (-want +have):\n%s", status.Generation, diff)
	}
}
