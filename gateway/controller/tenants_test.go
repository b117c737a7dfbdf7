package controller

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/isthmus-net/isthmus/gateway/service"
)

// refused fails the test unless a Service reports a reason and a text, by its condition Mapped and by an event.
func (w *testbed) refused(name, reason, text string) {
	w.t.Helper()
	c := w.condition(name, service.ConditionMapped)
	if c.Reason != reason || !strings.Contains(c.Message, text) {
		w.t.Errorf("%s: %+v, want %s: %s", name, c, reason, text)
	}
	if !slices.ContainsFunc(w.events, func(e string) bool { return strings.HasPrefix(e, reason+" "+name+": ") && strings.Contains(e, text) }) {
		w.t.Errorf("%s: no event %s says %q: %q", name, reason, text, w.events)
	}
}

// A tenant asks in every way for the addresses of another tenant's Services. It gets other ones, or is refused without a word
// about the Services that have them, which see nothing of it. The same key on both Services shares the address.
func TestAddressesOfAnotherNamespace(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	list := annotation(service.AnnotationPool, "list")
	w.create(w.newService("victim", list, 80), w.newService("floating", nil, 80))
	w.refresh()
	at, floating := addresses(w.get("victim"))[0], addresses(w.get("floating"))[0]
	port := w.get("floating").Annotations[service.AnnotationPort]
	version, served := w.get("victim").ResourceVersion, w.served("victim")
	w.events = nil

	victims := w.ns
	w.as(w.addNamespace(), func() {
		w.create(
			w.newService("other", list, 443),
			w.newService("by-address", func(s *corev1.Service) { list(s); annotation(service.AnnotationPort, at)(s) }, 443),
			w.newService("by-addresses", func(s *corev1.Service) { list(s); annotation(service.AnnotationAddresses, at)(s) }, 443),
			w.newService("by-port", annotation(service.AnnotationPort, port), 443),
			w.newService("by-floating-ip", annotation(service.AnnotationFloatingIP, floating), 443),
			w.newService("other-floating-ip", nil, 443),
		)
		w.refresh()
		if have := addresses(w.get("other")); len(have) != 1 || have[0] == at {
			t.Errorf("a Service that names none has %v; the other tenant's is %s", have, at)
		}
		if have := addresses(w.get("other-floating-ip")); len(have) != 1 || have[0] == floating {
			t.Errorf("a Service that names no floating IP has %v; the other tenant's is %s", have, floating)
		}
		for name, what := range map[string]string{"by-address": at, "by-addresses": at, "by-port": port, "by-floating-ip": floating} {
			w.refused(name, service.ReasonInvalid, "Services of another namespace have "+what)
			if c := w.condition(name, service.ConditionMapped); strings.Contains(c.Message, victims) || !strings.Contains(c.Message, service.AnnotationSharing) {
				t.Errorf("%s: %s", name, c.Message)
			}
			if have := addresses(w.get(name)); len(have) > 0 {
				t.Errorf("%s has %v", name, have)
			}
		}
	})
	if is := w.get("victim"); is.ResourceVersion != version || slices.ContainsFunc(w.events, func(e string) bool { return strings.Contains(e, " victim: ") }) {
		t.Errorf("the other tenant sees it: %+v, %q", is.ObjectMeta, w.events)
	}
	if diff := cmp.Diff(served, w.served("victim")); diff != "" {
		t.Errorf("gateways serve the other tenant (-before +now):\n%s", diff)
	}
}

// The same key on both Services lets a tenant come to the other's address. Without the key on one of them, those who are there
// stay, also after a restart, and no Service joins them.
func TestSharingKey(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	shared := func(key string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			annotation(service.AnnotationPool, "list")(s)
			annotation(service.AnnotationPort, "192.0.2.9")(s)
			annotation(service.AnnotationSharing, key)(s)
		}
	}
	w.create(w.newService("one", shared("web"), 80))
	w.refresh()
	victims := w.ns
	tenants := w.addNamespace()
	w.as(tenants, func() {
		w.create(w.newService("two", shared("web"), 443), w.newService("three", shared("mail"), 25), w.newService("four", shared("web"), 80))
	})
	w.refresh()
	check := func(when string) {
		t.Helper()
		w.as(victims, func() {
			if have := addresses(w.get("one")); !slices.Equal(have, []string{"192.0.2.9"}) {
				t.Errorf("%s: the first has %v", when, have)
			}
		})
		w.as(tenants, func() {
			if have := addresses(w.get("two")); !slices.Equal(have, []string{"192.0.2.9"}) {
				t.Errorf("%s: the one with the key has %v", when, have)
			}
			if have := addresses(w.get("four")); !slices.Equal(have, []string{"192.0.2.10"}) {
				t.Errorf("%s: the one with the key, and with a port that is taken, has %v", when, have)
			}
		})
	}
	check("with the key")
	w.as(tenants, func() { w.refused("three", service.ReasonInvalid, "Services of another namespace have 192.0.2.9") })
	w.edit("one", annotation(service.AnnotationSharing, ""))
	w.as(tenants, func() { w.create(w.newService("five", shared("web"), 8080)) })
	w.refresh()
	check("the key removed")
	w.as(tenants, func() { w.refused("five", service.ReasonInvalid, "Services of another namespace have 192.0.2.9") })
	w.recover()
	check("after a restart")
}

// A floating IP that a Service retained goes to no other namespace.
func TestRetainedFloatingIPOfANamespace(t *testing.T) {
	w := newAPITestbed(t)
	w.noError(w.Sync(t.Context()))
	w.create(w.newService("a", annotation(service.AnnotationFloatingIPAfterwards, "retain"), 80))
	w.refresh()
	kept := addresses(w.get("a"))[0]
	w.remove("a")
	w.refresh()
	w.as(w.addNamespace(), func() {
		w.create(w.newService("thief", annotation(service.AnnotationFloatingIP, kept), 80))
		w.refresh()
		w.refused("thief", service.ReasonInvalid, "floating IP "+kept+" was kept for another namespace")
	})
	w.create(w.newService("again", annotation(service.AnnotationFloatingIP, kept), 80))
	w.refresh()
	if have := addresses(w.get("again")); !slices.Equal(have, []string{kept}) {
		t.Errorf("in its own namespace it is %v, want %s", have, kept)
	}
}
