package broker_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

// property is a property in which two exports may differ; each of them has one of two variants.
type property struct {
	reason string // of the conflict
	// service and export set variant 0 or 1; nil if the property is not theirs.
	service func(*corev1.Service, int)
	export  func(*v1beta1.ServiceExport, int)
	// read returns the value in an import.
	read func(*v1beta1.ServiceImport) string
	// alone is what an import has when all exports have a variant, disputed when the oldest has variant 0
	// and another one variant 1.
	alone    [2]string
	disputed string
	headless bool // the Services are headless
	anew     bool // a Service cannot change it and must be made anew
}

func readPorts(si *v1beta1.ServiceImport) string {
	var all []string
	for _, p := range si.Spec.Ports {
		all = append(all, fmt.Sprintf("%s=%d", p.Name, p.Port))
	}
	return strings.Join(all, ",")
}

// readExported lists labels or annotations that an export may have asked for.
func readExported(all map[string]string) string {
	var kept []string
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if name, ok := strings.CutPrefix(key, "test/"); ok {
			kept = append(kept, name+"="+all[key])
		}
	}
	return strings.Join(kept, ",")
}

func exported(variant int) map[string]string {
	return []map[string]string{{"test/tier": "web", "test/only-a": "x"}, {"test/tier": "db"}}[variant]
}

// properties are all of them.
var properties = map[string]property{
	"port-number": {
		reason: "PortConflict",
		service: func(s *corev1.Service, v int) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: []int32{42, 4242}[v]}}
		},
		read: readPorts, alone: [2]string{"tcp=42", "tcp=4242"}, disputed: "tcp=42",
	},
	"port-more": {
		reason: "PortConflict",
		service: func(s *corev1.Service, v int) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 42}, {Name: "udp", Protocol: corev1.ProtocolUDP, Port: 42}}
			if v == 1 {
				s.Spec.Ports = append([]corev1.ServicePort{{Name: "stcp", Protocol: corev1.ProtocolSCTP, Port: 142}}, s.Spec.Ports...)
			}
		},
		read: readPorts, alone: [2]string{"tcp=42,udp=42", "stcp=142,tcp=42,udp=42"}, disputed: "tcp=42,udp=42,stcp=142",
	},
	"port-name": {
		reason: "PortConflict",
		service: func(s *corev1.Service, v int) {
			s.Spec.Ports = []corev1.ServicePort{{Name: []string{"tcp", "tcp2"}[v], Protocol: corev1.ProtocolTCP, Port: []int32{42, 4242}[v]}}
		},
		read: readPorts, alone: [2]string{"tcp=42", "tcp2=4242"}, disputed: "tcp=42,tcp2=4242",
	},
	"type": {
		reason: "TypeConflict",
		service: func(s *corev1.Service, v int) {
			s.Spec.ClusterIP = []string{"", corev1.ClusterIPNone}[v]
		},
		read:  func(si *v1beta1.ServiceImport) string { return string(si.Spec.Type) },
		alone: [2]string{"ClusterSetIP", "Headless"}, disputed: "ClusterSetIP", anew: true,
	},
	"affinity": {
		reason: "SessionAffinityConflict",
		service: func(s *corev1.Service, v int) {
			s.Spec.SessionAffinity = []corev1.ServiceAffinity{corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP}[v]
			s.Spec.SessionAffinityConfig = nil
		},
		read:  func(si *v1beta1.ServiceImport) string { return string(si.Spec.SessionAffinity) },
		alone: [2]string{"None", "ClientIP"}, disputed: "None",
	},
	"affinity-config": {
		reason: "SessionAffinityConfigConflict",
		service: func(s *corev1.Service, v int) {
			timeout := []int32{10, 20}[v]
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		},
		read: func(si *v1beta1.ServiceImport) string {
			return fmt.Sprint(*si.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds)
		},
		alone: [2]string{"10", "20"}, disputed: "10",
	},
	"policy": {
		reason: "InternalTrafficPolicyConflict",
		service: func(s *corev1.Service, v int) {
			policy := []corev1.ServiceInternalTrafficPolicy{corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster}[v]
			s.Spec.InternalTrafficPolicy = &policy
		},
		read:  func(si *v1beta1.ServiceImport) string { return string(*si.Spec.InternalTrafficPolicy) },
		alone: [2]string{"Local", "Cluster"}, disputed: "Local",
	},
	"distribution": {
		reason: "TrafficDistributionConflict",
		service: func(s *corev1.Service, v int) {
			near := corev1.ServiceTrafficDistributionPreferClose
			s.Spec.TrafficDistribution = []*string{&near, nil}[v]
		},
		read: func(si *v1beta1.ServiceImport) string {
			if si.Spec.TrafficDistribution == nil {
				return ""
			}
			return *si.Spec.TrafficDistribution
		},
		alone: [2]string{"PreferClose", ""}, disputed: "PreferClose",
	},
	"families": {
		reason: "IPFamilyConflict",
		service: func(s *corev1.Service, v int) {
			if v == 1 {
				dualStack(s)
			}
		},
		read: func(si *v1beta1.ServiceImport) string {
			return strings.Trim(fmt.Sprint(si.Spec.IPFamilies), "[]")
		},
		alone: [2]string{"IPv4", "IPv4 IPv6"}, disputed: "IPv4", headless: true, anew: true,
	},
	"labels": {
		reason: "LabelsConflict",
		export: func(e *v1beta1.ServiceExport, v int) { e.Spec.ExportedLabels = exported(v) },
		read:   func(si *v1beta1.ServiceImport) string { return readExported(si.Labels) },
		alone:  [2]string{"only-a=x,tier=web", "tier=db"}, disputed: "only-a=x,tier=web",
	},
	"annotations": {
		reason: "AnnotationsConflict",
		export: func(e *v1beta1.ServiceExport, v int) { e.Spec.ExportedAnnotations = exported(v) },
		read:   func(si *v1beta1.ServiceImport) string { return readExported(si.Annotations) },
		alone:  [2]string{"only-a=x,tier=web", "tier=db"}, disputed: "only-a=x,tier=web",
	},
}

// publish writes the objects of exporters of a Service: records and slices, and an aggregate that the first of them has
// allocated. listed are the clusters in its status.
func (p property) publish(m *member, name string, variant int) {
	m.testbed.t.Helper()
	p.offer(m, name, variant)
	e := &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: m.testbed.ns, Name: name}}
	if p.export != nil {
		p.export(e, variant)
	}
	m.testbed.create(m, e)
}

func (p property) offer(m *member, name string, variant int) {
	m.testbed.t.Helper()
	m.service(name, func(s *corev1.Service) {
		if p.headless {
			s.Spec.ClusterIP = corev1.ClusterIPNone
		}
		if p.service != nil {
			p.service(s, variant)
		}
	})
}

// change gives m's Service and export another variant.
func (p property) change(m *member, name string, variant int) {
	m.testbed.t.Helper()
	switch {
	case p.export != nil:
		m.editExport(name, func(e *v1beta1.ServiceExport) { p.export(e, variant) })
	case p.anew:
		m.deleteService(name)
		p.offer(m, name, variant)
	default:
		m.editService(name, func(s *corev1.Service) { p.service(s, variant) })
	}
}

// has waits until every member's import has value and clusters.
func (p property) has(w *testbed, name, value string, clusters ...string) {
	w.t.Helper()
	for _, m := range w.both() {
		w.eventually(func() error {
			si, _ := m.imported(name)
			if si == nil {
				return fmt.Errorf("%s has no import %s", m.id, name)
			}
			var from []string
			for _, c := range si.Status.Clusters {
				from = append(from, c.Cluster)
			}
			if have := p.read(si); have != value || !slices.Equal(from, clusters) {
				return fmt.Errorf("import %s in %s has %q of %v, want %q of %v", name, m.id, have, from, value, clusters)
			}
			return nil
		})
	}
}

// Two members export Services that differ in one property each. Both get the same conflict message, the variant of the
// oldest export is imported, and its endpoints stay. The conflict ends in each of three ways: the younger one changes,
// the older one changes, or the older one leaves.
func TestConflictInEveryProperty(t *testing.T) {
	w := newTestbed(t).run()
	ways := []string{"younger", "older", "leaves"}
	keys := slices.Sorted(maps.Keys(properties))
	each := func(do func(p property, key, way, name string)) {
		for _, key := range keys {
			for _, way := range ways {
				do(properties[key], key, way, key+"-"+way)
			}
		}
	}
	each(func(p property, _, _, name string) { p.publish(w.a, name, 0) })
	each(func(p property, _, _, name string) { p.has(w, name, p.alone[0], "a") })
	w.laterThan(w.a, keys[len(keys)-1]+"-"+ways[len(ways)-1])
	vips := map[string][]string{}
	each(func(_ property, _, way, name string) {
		si, _ := w.b.imported(name)
		vips[name] = si.Spec.IPs
		if way == "younger" {
			w.b.keeps(name, w.a.address(1))
		}
	})

	each(func(p property, _, _, name string) { p.publish(w.b, name, 1) })
	each(func(p property, key, _, name string) {
		p.has(w, name, p.disputed, "a", "b")
		w.eventually(func() error {
			a, b := w.a.condition(name, "Conflict", metav1.ConditionTrue, p.reason), w.b.condition(name, "Conflict", metav1.ConditionTrue, p.reason)
			if a != b || !strings.Contains(a, "1 of 2 clusters (b)") || !strings.Contains(a, "cluster a") {
				return fmt.Errorf("%s: a is told %q and b %q", key, a, b)
			}
			return nil
		})
		for _, m := range w.both() {
			m.condition(name, "Valid", metav1.ConditionTrue, "Valid")
			m.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		}
		if si, _ := w.b.imported(name); !slices.Equal(si.Spec.IPs, vips[name]) {
			t.Errorf("%s: the conflict changed the addresses from %v to %v", key, vips[name], si.Spec.IPs)
		}
	})
	conformance.Holds(t, "N20", "N23", "N24", "N25", "N26", "N27", "N31", "N32", "C8", "C9", "C13", "C16", "L18")

	each(func(p property, _, way, name string) {
		switch way {
		case "younger":
			p.change(w.b, name, 0)
		case "older":
			p.change(w.a, name, 1)
		case "leaves":
			w.a.unexport(name)
		}
	})
	each(func(p property, _, way, name string) {
		switch way {
		case "younger":
			p.has(w, name, p.alone[0], "a", "b")
		case "older":
			p.has(w, name, p.alone[1], "a", "b")
		case "leaves":
			p.has(w, name, p.alone[1], "b")
		}
		w.b.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
		if way != "leaves" {
			w.a.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
		}
	})
	conformance.Holds(t, "N30", "L17", "L20", "L24")
}

// The slices of each exporter have only its own ports of the import.
func TestSlicesHaveOnlyTheirMembersPorts(t *testing.T) {
	w := newTestbed(t).run()
	for name, ports := range map[string][2]corev1.ServicePort{
		"numbers": {{Name: "tcp", Port: 42}, {Name: "tcp", Port: 4242}},
		"names":   {{Name: "tcp", Port: 42}, {Name: "tcp2", Port: 4242}},
	} {
		w.a.service(name, func(s *corev1.Service) { s.Spec.Ports = ports[:1] })
		w.a.export(name)
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.b.service(name, func(s *corev1.Service) { s.Spec.Ports = ports[1:] })
	}
	w.laterThan(w.a, "numbers")
	w.laterThan(w.a, "names")
	w.b.export("numbers")
	w.b.export("names")
	for _, m := range w.both() {
		want := onBoth
		want.ports, want.endpoints = []string{"tcp/42"}, []string{"10.97.0.1:8042", "10.98.0.1:"}
		m.wantsOrWithout("numbers", want, "10.98.0.1:")
		want.ports, want.endpoints = []string{"tcp/42", "tcp2/4242"}, []string{"10.97.0.1:8042", "10.98.0.1:12242"}
		m.wants("names", want)
	}
	conformance.Holds(t, "N29", "C26", "C27")
}

// wantsOrWithout is wants, but one of the endpoints may be missing: an endpoint without a port serves nothing.
func (m *member) wantsOrWithout(name string, e expect, endpoint string) {
	m.testbed.t.Helper()
	without := e
	without.endpoints = slices.DeleteFunc(slices.Clone(e.endpoints), func(s string) bool { return s == endpoint })
	m.testbed.eventually(func() error {
		si, imported := m.imported(name)
		if si == nil {
			return fmt.Errorf("%s has no import %s", m.id, name)
		}
		if err := e.check(m.id, si, imported); err != nil {
			return without.check(m.id, si, imported)
		}
		return nil
	})
}

// The reason has both conflicts, and the message one line for each; one may end before the other. A member that never
// was in conflict gets the condition and no event.
func TestTwoConflictsAtOnce(t *testing.T) {
	w := newTestbed(t).run()
	w.a.service("hello")
	w.a.export("hello")
	w.b.wants("hello", helloOfA)
	w.laterThan(w.a, "hello")
	w.a.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")
	timeout := int32(10)
	w.b.service("hello", port("more", corev1.ProtocolTCP, 81), func(s *corev1.Service) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
	})
	w.b.export("hello")
	for _, m := range w.both() {
		said := m.condition("hello", "Conflict", metav1.ConditionTrue, "PortConflict,SessionAffinityConflict")
		if lines := strings.Split(said, "\n"); len(lines) != 2 || !strings.HasPrefix(lines[0], "field ports ") || !strings.HasPrefix(lines[1], "field sessionAffinity ") {
			t.Errorf("%s says %q", m.id, said)
		}
	}
	conformance.Holds(t, "N23")
	w.b.editService("hello", func(s *corev1.Service) {
		s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
	})
	for _, m := range w.both() {
		if said := m.condition("hello", "Conflict", metav1.ConditionTrue, "PortConflict"); strings.Contains(said, "\n") {
			t.Errorf("%s says %q", m.id, said)
		}
	}
	conformance.Holds(t, "L22")
	w.b.editService("hello", func(s *corev1.Service) { s.Spec.Ports = s.Spec.Ports[:1] })
	for _, m := range w.both() {
		m.condition("hello", "Conflict", metav1.ConditionFalse, "NoConflicts")
	}

	w.a.service("peaceful")
	w.a.export("peaceful")
	w.a.condition("peaceful", "Conflict", metav1.ConditionFalse, "NoConflicts")
	w.quiet()
	if reasons := w.a.eventsOn("peaceful"); slices.Contains(reasons, "NoConflicts") || !slices.Contains(reasons, "Exported") {
		t.Errorf("events of an export without conflicts: %v", reasons)
	}
	conformance.Holds(t, "L23")
	w.eventually(func() error {
		reasons := w.b.eventsOn("hello")
		for _, reason := range []string{"Conflict", "NoConflicts"} {
			if !slices.Contains(reasons, reason) {
				return fmt.Errorf("events of an export with conflicts: %v", reasons)
			}
		}
		return nil
	})
}

// The test follows the upstream conformance suite with its own Service.
func TestServiceOfTheUpstreamSuite(t *testing.T) {
	w := newTestbed(t).run()
	timeout, near, dual, protocol := int32(10), corev1.ServiceTrafficDistributionPreferClose, corev1.IPFamilyPolicyPreferDualStack, "example.org/hello"
	hello := func(s *corev1.Service) {
		s.Labels, s.Annotations = map[string]string{"test/of": "the-service"}, map[string]string{"test/of": "the-service"}
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 42, AppProtocol: &protocol}, {Name: "udp", Protocol: corev1.ProtocolUDP, Port: 42},
		}
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		s.Spec.IPFamilyPolicy, s.Spec.TrafficDistribution = &dual, &near
	}
	svc := w.a.service("hello", hello)
	w.create(w.a, &v1beta1.ServiceExport{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "hello", Labels: map[string]string{"test/of": "the-export"}, Annotations: map[string]string{"test/of": "the-export"}},
		Spec:       v1beta1.ServiceExportSpec{ExportedLabels: exported(0), ExportedAnnotations: exported(1)},
	})
	w.b.service("hello", hello)
	w.a.service("headless", hello, func(s *corev1.Service) {
		s.Spec.ClusterIP, s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ClusterIPNone, "", nil
	})
	w.a.export("headless")

	want := expect{
		typ: v1beta1.ClusterSetIP, ips: 2, clusters: []string{"a"}, ports: []string{"tcp/42", "udp/42"},
		endpoints: []string{"10.97.0.1:8042,8042", "fd00:97::1:8042,8042"},
	}
	headless := want
	headless.typ, headless.ips = v1beta1.Headless, 0
	w.a.condition("hello", "Valid", metav1.ConditionTrue, "Valid")
	for _, m := range w.both() {
		si := m.wants("hello", want)
		if p := si.Spec.Ports[0]; p.Protocol != corev1.ProtocolTCP || p.AppProtocol == nil || *p.AppProtocol != protocol || si.Spec.Ports[1].Protocol != corev1.ProtocolUDP {
			t.Errorf("ports in %s: %+v", m.id, si.Spec.Ports)
		}
		conformance.Holds(t, "C7")
		if si.Spec.SessionAffinity != svc.Spec.SessionAffinity || *si.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds != timeout ||
			*si.Spec.InternalTrafficPolicy != *svc.Spec.InternalTrafficPolicy || *si.Spec.TrafficDistribution != near {
			t.Errorf("policies in %s: %+v", m.id, si.Spec)
		}
		conformance.Holds(t, "C3", "C4", "C5")
		if !slices.Equal(si.Spec.IPFamilies, svc.Spec.IPFamilies) {
			t.Errorf("families in %s: %v, of the service %v", m.id, si.Spec.IPFamilies, svc.Spec.IPFamilies)
		}
		conformance.Holds(t, "C6", "N19")
		if labels, annotations := readExported(si.Labels), readExported(si.Annotations); labels != "only-a=x,tier=web" || annotations != "tier=db" {
			t.Errorf("in %s: labels %q, annotations %q", m.id, labels, annotations)
		}
		conformance.Holds(t, "C15", "N9")
		_, imported := m.imported("hello")
		for _, es := range imported {
			if es.Labels[v1beta1.LabelServiceName] != "hello" || es.Labels[v1beta1.LabelSourceCluster] != "a" ||
				es.Labels[discoveryv1.LabelManagedBy] != v1alpha1.ManagedBy || es.Labels[discoveryv1.LabelServiceName] != "" {
				t.Errorf("labels of %s in %s: %v", es.Name, m.id, es.Labels)
			}
		}
		conformance.Holds(t, "C17", "N35")
		m.wants("headless", headless)
	}
	w.quiet()
	for _, m := range w.both() {
		m.wants("headless", headless)
	}
	conformance.Holds(t, "C11")

	// The import exists while a member exports the Service.
	w.b.export("hello")
	w.b.condition("hello", "Ready", metav1.ConditionTrue, "Exported")
	w.a.unexport("hello")
	w.a.unexport("headless")
	want.clusters, want.endpoints = []string{"b"}, []string{"10.98.0.1:8042,8042", "fd00:98::1:8042,8042"}
	for _, m := range w.both() {
		m.wants("hello", want)
		m.wantsNone("headless")
	}
	w.b.unexport("hello")
	for _, m := range w.both() {
		m.wantsNone("hello")
	}
	conformance.Holds(t, "C1", "C2", "C10")
}
