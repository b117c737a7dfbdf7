package broker_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// exportWith exports a Service that requests an address ("true"), declines one ("false") or has no annotation ("").
func (m *member) exportWith(name, choice string) {
	m.testbed.t.Helper()
	e := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}
	if choice != "" {
		e.Annotations = map[string]string{v1alpha1.AnnotationUseClusterSetIP: choice}
	}
	m.testbed.create(m, e)
}

// choose changes the annotation of an export about an address.
func (m *member) choose(name, choice string) {
	m.testbed.t.Helper()
	m.editExport(name, func(e *v1beta1.ServiceExport) {
		delete(e.Annotations, v1alpha1.AnnotationUseClusterSetIP)
		if choice != "" {
			metav1.SetMetaDataAnnotation(&e.ObjectMeta, v1alpha1.AnnotationUseClusterSetIP, choice)
		}
	})
}

// aggregate reads the aggregate of a Service.
func (w *testbed) aggregate(name string) *v1beta1.ServiceImport {
	w.t.Helper()
	si := &v1beta1.ServiceImport{}
	w.noError(w.broker.Get(w.t.Context(), client.ObjectKey{Namespace: w.brokerNS, Name: name + "." + w.ns}, si))
	return si
}

// block reports whether address lies in the IPv4 block of member id.
func inBlock(id, address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && netip.MustParsePrefix(blocks[id][0]).Contains(a)
}

// offOnA disables ClusterSetIPs by default in member "a", and enables them in every other member.
func offOnA(m *v1alpha1.MemberSpec) { m.ClusterSetIPEnabled = m.ClusterID != "a" }

// withoutAddress is the import of svc, which m exports alone and without an address.
func (m *member) withoutAddress(svc *corev1.Service) expect {
	return expect{
		typ: v1beta1.ClusterSetIP, clusters: []string{m.id}, ports: []string{"http/80"},
		endpoints: []string{svc.Spec.ClusterIP + ":80"},
	}
}

// A Service that requests an address, by annotation or by default, gets one of its member's block. One that declines is
// exported with the Service's own address. Headless Services never get one.
func TestAddressByAnnotationOrDefault(t *testing.T) {
	w := newTestbed(t, offOnA).run()
	for name, c := range map[string]struct {
		m        *member
		choice   string
		headless bool
		address  bool
	}{
		"off-plain":    {m: w.a},
		"off-asks":     {m: w.a, choice: "true", address: true},
		"off-headless": {m: w.a, choice: "true", headless: true},
		"on-plain":     {m: w.b, address: true},
		"on-declines":  {m: w.b, choice: "false"},
		"on-headless":  {m: w.b, headless: true},
	} {
		svc := c.m.service(name, func(s *corev1.Service) {
			if c.headless {
				s.Spec.ClusterIP = corev1.ClusterIPNone
			}
		})
		c.m.exportWith(name, c.choice)
		c.m.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		c.m.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
		want := c.m.withoutAddress(svc)
		switch {
		case c.headless:
			want.typ, want.endpoints = v1beta1.Headless, []string{c.m.address(1) + ":8080"}
		case c.address:
			want.ips, want.endpoints = 1, []string{c.m.address(1) + ":8080"}
		}
		for _, m := range w.both() {
			si := m.wants(name, want)
			said, agreed := si.Annotations[v1alpha1.AnnotationUseClusterSetIP], w.aggregate(name)
			by := agreed.Annotations[v1alpha1.AnnotationAllocatedBy]
			switch {
			case c.address:
				if !inBlock(c.m.id, si.Spec.IPs[0]) || !slices.Equal(agreed.Spec.IPs, si.Spec.IPs) || by != c.m.id || agreed.Annotations[v1alpha1.AnnotationUseClusterSetIP] != "true" {
					t.Errorf("%s: in %s %v; agreed %v %v", name, m.id, si.Spec.IPs, agreed.Spec.IPs, agreed.Annotations)
				}
			case c.headless:
				if by != "" || len(agreed.Spec.IPs) > 0 {
					t.Errorf("%s: agreed %v %v", name, agreed.Spec.IPs, agreed.Annotations)
				}
			default:
				if said != "false" || by != "" || len(agreed.Spec.IPs) > 0 || agreed.Annotations[v1alpha1.AnnotationUseClusterSetIP] != "false" {
					t.Errorf("%s: in %s %q; agreed %v %v", name, m.id, said, agreed.Spec.IPs, agreed.Annotations)
				}
			}
		}
	}
	conformance.Holds(t, "L29", "L35", "V2", "V36")
	w.keepsAddress("on-plain")
	conformance.Holds(t, "N17")
	for _, name := range []string{"off-asks", "off-plain"} {
		w.a.unexport(name)
		w.b.wantsNone(name)
	}
	conformance.Holds(t, "L26")
}

// The first export decides, in both directions. The others get the condition Conflict and are exported all the same.
// Changed annotations do not change the import until all exports are deleted and created again.
func TestFirstExportDecidesAboutTheAddress(t *testing.T) {
	const reason = "ClusterSetIPEnablementConflict"
	w := newTestbed(t).run()
	services, ofB := map[string]*corev1.Service{}, map[string]*corev1.Service{}
	first := map[string]string{"with": "true", "without": "false"}
	other := map[string]string{"with": "false", "without": "true"}
	for name, choice := range first {
		services[name] = w.a.service(name)
		w.a.exportWith(name, choice)
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
	}
	vip := w.b.wants("with", helloOfA).Spec.IPs
	w.b.wants("without", w.a.withoutAddress(services["without"]))
	w.laterThan(w.a, "with")
	w.laterThan(w.a, "without")

	unchanged := func() {
		t.Helper()
		for _, m := range w.both() {
			if have := m.wants("with", onBoth).Spec.IPs; !slices.Equal(have, vip) {
				t.Errorf("in %s the address changed from %v to %v", m.id, vip, have)
			}
			want := w.a.withoutAddress(services["without"])
			want.clusters, want.endpoints = []string{"a", "b"}, append(want.endpoints, ofB["without"].Spec.ClusterIP+":80")
			m.wants("without", want)
		}
	}
	conflict := func(name string) {
		t.Helper()
		w.eventually(func() error {
			a, b := w.a.condition(name, "Conflict", metav1.ConditionTrue, reason), w.b.condition(name, "Conflict", metav1.ConditionTrue, reason)
			if a != b || !strings.Contains(a, "use-clusterset-ip") {
				return fmt.Errorf("%s: a is told %q and b %q", name, a, b)
			}
			return nil
		})
		for _, m := range w.both() {
			m.condition(name, "Valid", metav1.ConditionTrue, "Valid")
			m.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		}
	}
	agreement := func(name string) {
		t.Helper()
		for _, m := range w.both() {
			m.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
		}
	}
	for name := range first {
		ofB[name] = w.b.service(name)
		w.b.exportWith(name, other[name])
	}
	for name := range first {
		conflict(name)
	}
	unchanged()
	conformance.Holds(t, "N33")
	for name := range first { // mended
		w.b.choose(name, first[name])
		agreement(name)
	}
	unchanged()
	conformance.Holds(t, "L30")
	for name := range first { // the oldest changes its mind, too late
		w.a.choose(name, other[name])
		conflict(name)
	}
	unchanged()
	for name := range first { // all have: the import still is as it was
		w.b.choose(name, other[name])
		conflict(name)
	}
	unchanged()

	// Only a new export gets a new choice.
	for name := range first {
		for _, m := range w.both() {
			m.unexport(name)
		}
		w.b.wantsNone(name)
	}
	w.brokerEmpty()
	for name := range first {
		w.a.exportWith(name, other[name])
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.a.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
	}
	for _, m := range w.both() {
		m.wants("with", w.a.withoutAddress(services["with"]))
		m.wants("without", helloOfA)
	}
	conformance.Holds(t, "V26")
}

// A changed default applies to new exports after a restart of the controller. Existing ones stay, and get the condition
// Conflict if they have no annotation.
func TestChangedDefaultAffectsNewExports(t *testing.T) {
	w := newTestbed(t).run()
	for name, choice := range map[string]string{"plain": "", "asks": "true"} {
		w.a.service(name)
		w.a.exportWith(name, choice)
	}
	vips := map[string][]string{}
	for _, name := range []string{"plain", "asks"} {
		vips[name] = w.b.wants(name, helloOfA).Spec.IPs
	}
	w.a.stop()
	w.a.settings = broker.Settings{ClusterSetIP: "disabled"}
	w.run(w.a)
	later := w.a.service("later")
	w.a.export("later")
	for _, m := range w.both() {
		m.wants("later", w.a.withoutAddress(later))
	}
	conformance.Holds(t, "V5")
	w.a.condition("plain", "Conflict", metav1.ConditionTrue, "ClusterSetIPEnablementConflict")
	w.a.condition("asks", "Conflict", metav1.ConditionFalse, "NoConflicts")
	w.a.condition("later", "Conflict", metav1.ConditionFalse, "NoConflicts")
	for name, before := range vips {
		if after := w.b.wants(name, helloOfA).Spec.IPs; !slices.Equal(before, after) {
			t.Errorf("%s: the address changed from %v to %v", name, before, after)
		}
	}
	conformance.Holds(t, "V27")
}

// A member without a block exports without an address. The Service gets one when a member with a block exports it.
func TestMemberWithoutABlock(t *testing.T) {
	w := newTestbed(t, func(m *v1alpha1.MemberSpec) {
		if m.ClusterID == "a" {
			m.ClusterSetIPCIDR = nil
		}
	}).run()
	w.a.service("hello")
	w.a.export("hello")
	w.a.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	for _, m := range w.both() {
		m.importReady("hello", metav1.ConditionFalse, "Pending")
		w.eventually(func() error {
			si, imported := m.imported("hello")
			if len(si.Spec.IPs) > 0 || si.Spec.Type != v1beta1.ClusterSetIP {
				t.Errorf("in %s: %+v", m.id, si.Spec)
			}
			return same("endpoints in "+m.id, helloOfA.endpoints, flatten(imported))
		})
	}
	conformance.Holds(t, "L27")
	w.b.service("hello")
	w.b.export("hello")
	for _, m := range w.both() {
		if si := m.wants("hello", onBoth); !inBlock("b", si.Spec.IPs[0]) {
			t.Errorf("in %s the address is %v", m.id, si.Spec.IPs)
		}
	}
}

// A released address is not allocated again during its quarantine, not even after a restart, and is allocated again
// afterwards.
func TestAddressQuarantine(t *testing.T) {
	const quarantine = 3 * time.Second
	w := newTestbed(t, twoAddresses)
	w.a.settings.Quarantine = quarantine
	w.run()
	for _, name := range []string{"first", "second", "third"} {
		w.a.service(name)
	}
	w.a.export("first")
	w.a.export("second")
	vip := w.b.wants("first", helloOfA).Spec.IPs
	w.b.wants("second", helloOfA)
	w.a.export("third")
	w.a.condition("third", "Ready", metav1.ConditionFalse, "Failed")
	w.a.unexport("first")
	freed := time.Now()
	w.b.wantsNone("first")
	w.a.stop()
	w.run(w.a)
	var got time.Time
	w.eventually(func() error {
		si, _ := w.b.imported("third")
		if si == nil || len(si.Spec.IPs) == 0 {
			return fmt.Errorf("the import is %+v", si)
		}
		got = time.Now()
		return same("address", vip, si.Spec.IPs)
	})
	// The tombstone's time has whole seconds.
	if rested := got.Sub(freed); rested < quarantine-time.Second {
		t.Errorf("the address was given again after %s, want at least %s", rested, quarantine)
	}
	conformance.Holds(t, "L26", "L32")
	w.a.condition("third", "Ready", metav1.ConditionTrue, "Exported")
	conformance.Holds(t, "L28")
}

// TestInheritedBlock: the address of a Service outlives the membership of the one that gave it, and the
// member that inherits the block does not give it again.
func TestInheritedBlock(t *testing.T) {
	w := newTestbed(t, twoAddresses).run()
	inherited := []string{"243.10.3.0/30"}
	w.a.service("hello")
	w.a.export("hello")
	vip := w.b.wants("hello", helloOfA).Spec.IPs
	w.b.service("hello")
	w.b.export("hello")
	w.b.wants("hello", onBoth)
	w.a.unexport("hello")
	onlyB := onBoth
	onlyB.clusters, onlyB.endpoints = []string{"b"}, []string{"10.98.0.1:8080"}
	w.b.wants("hello", onlyB)
	conformance.Holds(t, "L31")

	w.a.stop()
	w.b.stop()
	now := metav1.Now()
	registered := func(id string) *v1alpha1.Member {
		return &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: id}}
	}
	config := &v1alpha1.ClusterSetConfig{ObjectMeta: metav1.ObjectMeta{Namespace: w.brokerNS, Name: v1alpha1.ClusterSetConfigName}}
	edit(w, w.broker, config, func(c *v1alpha1.ClusterSetConfig) {
		c.Spec.Members = []v1alpha1.MemberBlocks{{ClusterID: "b", ClusterSetIPCIDR: inherited}}
	})
	edit(w, w.broker, registered("a"), func(m *v1alpha1.Member) { m.Spec.LeftAt = &now })
	edit(w, w.broker, registered("b"), func(m *v1alpha1.Member) { m.Spec.ClusterSetIPCIDR = inherited })
	edit(w, w.b.Client, &v1alpha1.Member{ObjectMeta: metav1.ObjectMeta{Namespace: w.b.install, Name: "b"}}, func(m *v1alpha1.Member) { m.Spec.ClusterSetIPCIDR = inherited })
	w.run(w.b)
	if have := w.b.wants("hello", onlyB).Spec.IPs; !slices.Equal(have, vip) {
		t.Errorf("the address changed from %v to %v", vip, have)
	}
	// One of the two addresses of the block is taken.
	for _, name := range []string{"second", "third"} {
		w.b.service(name)
		w.b.export(name)
		if name == "second" {
			if si := w.b.wants(name, onlyB); slices.Equal(si.Spec.IPs, vip) {
				t.Errorf("both services have %v", vip)
			}
		}
	}
	conformance.Holds(t, "L33")
	w.b.condition("third", "Ready", metav1.ConditionFalse, "Failed")
}

// keepsAddress changes a Service that b exports until nothing but its name and address is as before.
func (w *testbed) keepsAddress(name string) {
	w.t.Helper()
	si, _ := w.a.imported(name)
	vip := si.Spec.IPs
	w.b.editService(name, func(s *corev1.Service) { s.Spec.Ports[0].Name, s.Spec.Ports[0].Port = "web", 81 })
	w.noError(w.b.DeleteAllOf(w.t.Context(), &discoveryv1.EndpointSlice{}, client.InNamespace(w.ns), client.MatchingLabels{discoveryv1.LabelServiceName: name}))
	for _, m := range w.both() {
		if si := m.wants(name, expect{typ: v1beta1.ClusterSetIP, ips: 1, clusters: []string{"b"}, ports: []string{"web/81"}}); !slices.Equal(si.Spec.IPs, vip) {
			w.t.Errorf("the address of %s in %s was %v and is %v", name, m.id, vip, si.Spec.IPs)
		}
	}
}

// A fault on the broker gives a Service the address of another one. The older import keeps it. The other has none and says whose it
// is, until the fault is mended.
func TestAddressOfAnotherService(t *testing.T) {
	w := newTestbed(t).run()
	for _, name := range []string{"hello", "copy"} {
		w.a.service(name)
		w.a.export(name)
		w.b.wants(name, helloOfA)
		<-time.After(time.Second) // creation times are whole seconds
	}
	w.quiet()
	own := w.aggregate("copy").Spec.IPs
	edit(w, w.broker, w.aggregate("copy"), func(si *v1beta1.ServiceImport) { si.Spec.IPs = w.aggregate("hello").Spec.IPs })
	if said := w.b.importReady("copy", metav1.ConditionFalse, mcs.ReasonAddressInUse); !strings.Contains(said, "service "+w.ns+"/hello already has the ClusterSetIP") {
		t.Errorf("the import says %q", said)
	}
	if si, _ := w.b.imported("copy"); len(si.Spec.IPs) > 0 {
		t.Errorf("it has the addresses %v", si.Spec.IPs)
	}
	w.b.wants("hello", helloOfA)
	edit(w, w.broker, w.aggregate("copy"), func(si *v1beta1.ServiceImport) { si.Spec.IPs = own })
	w.b.importReady("copy", metav1.ConditionTrue, string(v1beta1.ServiceImportReasonReady))
	w.b.wants("copy", helloOfA)
}
