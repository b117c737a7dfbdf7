package mcs_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

var (
	sameAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	noNil    = cmpopts.EquateEmpty()
)

// The generators draw only what can occur, with the corners often.

func genID(t *rapid.T) clusterset.ClusterID {
	return rapid.SampledFrom([]clusterset.ClusterID{"a", "a.b", "east-1", clusterset.ClusterID(strings.Repeat("x", 63))}).Draw(t, "cluster")
}

func genService(t *rapid.T) clusterset.ServiceName {
	part := rapid.SampledFrom([]string{"a", "a-b", "hello", strings.Repeat("n", 63)})
	return clusterset.ServiceName{Namespace: part.Draw(t, "namespace"), Name: part.Draw(t, "name")}
}

func genIPs(t *rapid.T) []netip.Addr {
	v4, v6 := netip.MustParseAddr("243.0.1.2"), netip.MustParseAddr("fd00:1::2")
	return rapid.SampledFrom([][]netip.Addr{nil, {v4}, {v6}, {v4, v6}, {v6, v4}}).Draw(t, "ips")
}

func genPorts(t *rapid.T) []clusterset.Port {
	var ports []clusterset.Port
	for i := range rapid.IntRange(0, 3).Draw(t, "ports") {
		ports = append(ports, clusterset.Port{
			Name:        fmt.Sprint("p", i)[:min(i*2, 2)], // the first one has no name
			Protocol:    rapid.SampledFrom([]clusterset.Protocol{clusterset.TCP, clusterset.UDP, clusterset.SCTP}).Draw(t, "protocol"),
			Port:        uint16(rapid.IntRange(0, 20000).Draw(t, "number")*3 + i + 1),
			AppProtocol: rapid.SampledFrom([]string{"", "kubernetes.io/h2c"}).Draw(t, "app"),
		})
	}
	return ports
}

func genAffinity(t *rapid.T) clusterset.SessionAffinity {
	return rapid.SampledFrom([]clusterset.SessionAffinity{
		{}, {ClientIP: true, Timeout: time.Second}, {ClientIP: true, Timeout: 24 * time.Hour},
	}).Draw(t, "affinity")
}

func genMap(t *rapid.T, label string) map[string]string {
	return rapid.SampledFrom([]map[string]string{nil, {"k": "v"}, {"k": "", "l": "w"}}).Draw(t, label)
}

var genFamilies = rapid.SampledFrom([][]clusterset.Family{
	{clusterset.IPv4}, {clusterset.IPv6}, {clusterset.IPv4, clusterset.IPv6}, {clusterset.IPv6, clusterset.IPv4},
})

var genType = rapid.SampledFrom([]clusterset.ServiceType{clusterset.ClusterSetIP, clusterset.Headless})

func genExport(t *rapid.T) clusterset.Export {
	return clusterset.Export{
		Cluster:               genID(t),
		Service:               genService(t),
		ExportedAt:            time.Unix(int64(rapid.Int32().Draw(t, "time")), 0).UTC(),
		Type:                  genType.Draw(t, "type"),
		Ports:                 genPorts(t),
		Families:              genFamilies.Draw(t, "families"),
		SessionAffinity:       genAffinity(t),
		InternalTrafficPolicy: rapid.SampledFrom([]string{"", "Local", "Cluster"}).Draw(t, "policy"),
		TrafficDistribution:   rapid.SampledFrom([]string{"", "PreferClose"}).Draw(t, "distribution"),
		Labels:                genMap(t, "labels"),
		ServiceLabels:         genMap(t, "service labels"),
		Annotations:           genMap(t, "annotations"),
		IPs:                   genIPs(t),
	}
}

func TestRecordRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := genExport(t)
		have, _, err := mcs.ParseRecord(mcs.ExportRecord(want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, have, sameAddr, noNil); diff != "" {
			t.Fatalf("(-want +have):\n%s", diff)
		}
	})
}

func TestImportRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := genExport(t)
		want, _ := clusterset.Merge([]clusterset.Export{e})
		want = want.WithIPs(e.IPs)
		have, err := mcs.Import(mcs.ServiceImport(want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, have, sameAddr, noNil); diff != "" {
			t.Fatalf("(-want +have):\n%s", diff)
		}
	})
}

func TestAggregateRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := clusterset.Aggregate{
			Service: genService(t), Type: genType.Draw(t, "type"), IPs: genIPs(t),
			AllocatedBy: rapid.SampledFrom([]clusterset.ClusterID{"", "a", "a.b"}).Draw(t, "by"),
			ExtendedBy:  rapid.SampledFrom([]clusterset.ClusterID{"", "b", "a.b"}).Draw(t, "extended by"),
			Clusters:    rapid.SampledFrom([][]clusterset.ClusterID{nil, {"a"}, {"a", "a.b"}}).Draw(t, "clusters"),
		}
		have, _, err := mcs.ParseAggregate(mcs.Aggregate(want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, have, sameAddr, noNil); diff != "" {
			t.Fatalf("(-want +have):\n%s", diff)
		}
	})
}

func TestAmbiguousJoinsAreDistinct(t *testing.T) {
	one := clusterset.ServiceName{Namespace: "c", Name: "a-b"}
	two := clusterset.ServiceName{Namespace: "b-c", Name: "a"}
	if mcs.AggregateName(one) == mcs.AggregateName(two) || mcs.RecordName("m", one) == mcs.RecordName("m", two) {
		t.Errorf("%s and %s are both %s", one, two, mcs.AggregateName(one))
	}
	if mcs.RecordName("a.b", two) == mcs.RecordName("a", clusterset.ServiceName{Namespace: "b-c", Name: "b"}) {
		t.Error("members a and a.b have one record name")
	}
	conformance.Holds(t, "L10")
}

// Names are equal only if all their parts are, and the longest one is a valid object name.
func TestNamesAreDistinctAndValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c1, c2, s1, s2 := genID(t), genID(t), genService(t), genService(t)
		if (mcs.RecordName(c1, s1) == mcs.RecordName(c2, s2)) != (c1 == c2 && s1 == s2) {
			t.Fatalf("records of %s %s and %s %s: %s", c1, s1, c2, s2, mcs.RecordName(c1, s1))
		}
		if (mcs.AggregateName(s1) == mcs.AggregateName(s2)) != (s1 == s2) {
			t.Fatalf("aggregates of %s and %s", s1, s2)
		}
		slice := mcs.BrokerSliceName(c1, s1, strings.Repeat("s", 253), discoveryv1.AddressTypeIPv4)
		for _, name := range []string{slice, mcs.ImportedSliceName(c1, s1.Name, slice)} {
			if len(name) > 253 {
				t.Fatalf("%s has %d characters", name, len(name))
			}
		}
		if slice == mcs.BrokerSliceName(c1, s1, strings.Repeat("s", 253), discoveryv1.AddressTypeIPv6) {
			t.Fatal("slices of two address types have one name")
		}
	})
}

func serviceExport() *v1beta1.ServiceExport {
	return &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello", CreationTimestamp: metav1.Unix(1000, 0)}}
}

func TestExport(t *testing.T) {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{
			"app": "hello", "example.org/team": "x",
			"app.kubernetes.io/name": "hello", "kubernetes.io/service-name": "hello", "topology.k8s.io/x": "", "isthmus.dev/cluster": "b",
		}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1",
			IPFamilies: []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, NodePort: 30053},
				{Name: "web", Port: 80, AppProtocol: new("http")},
			},
			SessionAffinity:       corev1.ServiceAffinityClientIP,
			InternalTrafficPolicy: new(corev1.ServiceInternalTrafficPolicyLocal),
			TrafficDistribution:   new("PreferClose"),
		},
	}
	e := serviceExport()
	e.Labels = map[string]string{"neither": "this"}
	e.Spec.ExportedLabels = map[string]string{"tier": "web"}
	e.Spec.ExportedAnnotations = map[string]string{}
	have, _, err := mcs.Export(svc, e, "a")
	if err != nil {
		t.Fatal(err)
	}
	want := clusterset.Export{
		Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"},
		ExportedAt: time.Unix(1000, 0).UTC(), Type: clusterset.ClusterSetIP,
		Ports: []clusterset.Port{
			{Name: "dns", Protocol: clusterset.UDP, Port: 53},
			{Name: "web", Protocol: clusterset.TCP, Port: 80, AppProtocol: "http"},
		},
		Families:              []clusterset.Family{clusterset.IPv6, clusterset.IPv4},
		SessionAffinity:       clusterset.SessionAffinity{ClientIP: true, Timeout: 3 * time.Hour},
		InternalTrafficPolicy: "Local", TrafficDistribution: "PreferClose",
		Labels:        map[string]string{"tier": "web"},
		ServiceLabels: map[string]string{"app": "hello", "example.org/team": "x"},
	}
	if diff := cmp.Diff(want, have, sameAddr); diff != "" {
		t.Errorf("(-want +have):\n%s", diff)
	}
	svc.Spec.ClusterIP = corev1.ClusterIPNone
	if have, _, _ := mcs.Export(svc, e, "a"); have.Type != clusterset.Headless {
		t.Errorf("without a cluster IP the type is %s", have.Type)
	}
}

func TestExportRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		svc  *corev1.Service
		want v1beta1.ServiceExportConditionReason
	}{
		"no service":    {nil, v1beta1.ServiceExportReasonNoService},
		"external name": {&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName}}, v1beta1.ServiceExportReasonInvalidServiceType},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := mcs.Export(tc.svc, serviceExport(), "a")
			var invalid *mcs.InvalidError
			if !errors.As(err, &invalid) || invalid.Reason != tc.want {
				t.Fatalf("error %v", err)
			}
			if c := mcs.Invalid(invalid); c.Status != metav1.ConditionFalse || c.Reason != string(tc.want) || c.Message == "" {
				t.Errorf("condition %+v", c)
			}
		})
	}
}

func goodImport() *v1beta1.ServiceImport {
	return &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: "hello"},
		Spec:       v1beta1.ServiceImportSpec{Type: v1beta1.ClusterSetIP, IPs: []string{"243.0.0.1"}, Ports: []v1beta1.ServicePort{{Port: 80}}},
		Status:     v1beta1.ServiceImportStatus{Clusters: []v1beta1.ClusterStatus{{Cluster: "b"}, {Cluster: "a"}}},
	}
}

func TestImportFillsWhatIsLeftOut(t *testing.T) {
	si := goodImport()
	si.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	have, err := mcs.Import(si)
	if err != nil {
		t.Fatal(err)
	}
	want := clusterset.Import{
		Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.ClusterSetIP,
		IPs: []netip.Addr{netip.MustParseAddr("243.0.0.1")}, Families: []clusterset.Family{clusterset.IPv4},
		Ports: []clusterset.Port{{Protocol: clusterset.TCP, Port: 80}}, Clusters: []clusterset.ClusterID{"a", "b"},
		SessionAffinity: clusterset.SessionAffinity{ClientIP: true, Timeout: 3 * time.Hour},
	}
	if diff := cmp.Diff(want, have, sameAddr); diff != "" {
		t.Errorf("(-want +have):\n%s", diff)
	}
}

func TestImportNamesObjectAndField(t *testing.T) {
	for name, tc := range map[string]struct {
		edit  func(*v1beta1.ServiceImport)
		field string
	}{
		"type":            {func(si *v1beta1.ServiceImport) { si.Spec.Type = "Other" }, "spec.type"},
		"no address":      {func(si *v1beta1.ServiceImport) { si.Spec.IPs = []string{"x"} }, "spec.ips"},
		"loopback":        {func(si *v1beta1.ServiceImport) { si.Spec.IPs = []string{"127.0.0.1"} }, "spec.ips"},
		"two of a family": {func(si *v1beta1.ServiceImport) { si.Spec.IPs = []string{"243.0.0.1", "243.0.0.2"} }, "spec.ips"},
		"mapped is IPv4":  {func(si *v1beta1.ServiceImport) { si.Spec.IPs = []string{"243.0.0.1", "::ffff:243.0.0.2"} }, "spec.ips"},
		"family":          {func(si *v1beta1.ServiceImport) { si.Spec.IPFamilies = []corev1.IPFamily{"IPv5"} }, "spec.ipFamilies"},
		"family twice":    {func(si *v1beta1.ServiceImport) { si.Spec.IPFamilies = []corev1.IPFamily{"IPv4", "IPv4"} }, "spec.ipFamilies"},
		"port 0":          {func(si *v1beta1.ServiceImport) { si.Spec.Ports[0].Port = 0 }, "spec.ports[0]"},
		"port 65536":      {func(si *v1beta1.ServiceImport) { si.Spec.Ports[0].Port = 65536 }, "spec.ports[0]"},
		"protocol":        {func(si *v1beta1.ServiceImport) { si.Spec.Ports[0].Protocol = "ICMP" }, "spec.ports[0]"},
		"port twice": {func(si *v1beta1.ServiceImport) {
			si.Spec.Ports = append(si.Spec.Ports, v1beta1.ServicePort{Name: "x", Port: 80})
		}, "spec.ports[1]"},
		"affinity": {func(si *v1beta1.ServiceImport) { si.Spec.SessionAffinity = "Cookie" }, "spec.sessionAffinity"},
		"affinity timeout": {func(si *v1beta1.ServiceImport) {
			si.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			si.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(0))}}
		}, "spec.sessionAffinity"},
		"cluster": {func(si *v1beta1.ServiceImport) { si.Status.Clusters[1].Cluster = "A" }, "status.clusters[1]"},
	} {
		t.Run(name, func(t *testing.T) {
			si := goodImport()
			tc.edit(si)
			_, err := mcs.Import(si)
			if err == nil || !strings.Contains(err.Error(), "service import demo/hello: ") || !strings.Contains(err.Error(), tc.field) {
				t.Errorf("error %v does not name %s", err, tc.field)
			}
		})
	}
}

func TestParseRecordRefuses(t *testing.T) {
	good := clusterset.Export{Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: clusterset.Headless}
	for name, edit := range map[string]func(*v1alpha1.ExportRecord){
		"another's name":       func(r *v1alpha1.ExportRecord) { r.Name = "b.hello.demo" },
		"a member in disguise": func(r *v1alpha1.ExportRecord) { r.Spec.ClusterID = "b" },
		"another's label":      func(r *v1alpha1.ExportRecord) { r.Labels[v1alpha1.LabelCluster] = "b" },
		"another service":      func(r *v1alpha1.ExportRecord) { r.Labels[v1alpha1.LabelServiceNamespace] = "kube-system" },
		"no cluster":           func(r *v1alpha1.ExportRecord) { r.Spec.ClusterID = "" },
		"a bad address":        func(r *v1alpha1.ExportRecord) { r.Spec.IPs = []string{"169.254.169.254"} },
		"a bad port":           func(r *v1alpha1.ExportRecord) { r.Spec.Import.Ports = []v1beta1.ServicePort{{Port: -1}} },
	} {
		t.Run(name, func(t *testing.T) {
			r := mcs.ExportRecord(good)
			edit(r)
			if e, _, err := mcs.ParseRecord(r); err == nil || !strings.Contains(err.Error(), "export record "+r.Name) {
				t.Errorf("ParseRecord = %v, %v", e, err)
			}
		})
	}
}

func sourceSlice() *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "demo", Name: "hello-abcde", Labels: map[string]string{discoveryv1.LabelServiceName: "hello"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{
			{Name: new("web"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))},
			{Name: new("dns"), Protocol: new(corev1.ProtocolUDP), Port: new(int32(5353))},
		},
		Endpoints: []discoveryv1.Endpoint{
			{
				Addresses: []string{"10.0.0.2"}, Hostname: new("hello-0"), NodeName: new("n1"), Zone: new("z1"),
				Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)},
				Hints:      &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z1"}}},
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Name: "hello-0"},
			},
			{Addresses: []string{"10.0.0.1"}},
			{Addresses: []string{"127.0.0.1"}},
			{Addresses: []string{"169.254.169.254"}},
		},
	}
}

// Pods of a headless Service without a hostname keep their names up to the node; those of other Services do not.
func TestPodNamesReachTheNode(t *testing.T) {
	for name, tc := range map[string]struct {
		source, imported clusterset.ServiceType
		hostname         *string
		kind, want       string
	}{
		"headless":                    {clusterset.Headless, clusterset.Headless, nil, "Pod", "hello-x7f"},
		"headless, with a hostname":   {clusterset.Headless, clusterset.Headless, new("h"), "Pod", ""},
		"headless, no pod":            {clusterset.Headless, clusterset.Headless, nil, "Machine", ""},
		"with an address":             {clusterset.ClusterSetIP, clusterset.ClusterSetIP, nil, "Pod", ""},
		"headless here, not imported": {clusterset.Headless, clusterset.ClusterSetIP, nil, "Pod", ""},
	} {
		t.Run(name, func(t *testing.T) {
			source := sourceSlice()
			if tc.source == clusterset.Headless {
				source.Labels[corev1.IsHeadlessService] = ""
			}
			source.Endpoints = source.Endpoints[:1]
			source.Endpoints[0].Hostname = tc.hostname
			source.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: tc.kind, Name: "hello-x7f", Namespace: "demo", UID: "1"}
			export := clusterset.Export{Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Type: tc.source}
			imp := clusterset.Import{Service: export.Service, Type: tc.imported}
			broker := mcs.BrokerSlice(source, "a")
			unpacked := mcs.Pack(broker).Unpack()
			if mcs.SliceDigest(unpacked) != mcs.SliceDigest(broker) {
				t.Error("packing changed the slice")
			}
			have, _, err := mcs.Slice(mcs.ImportedSlice(unpacked, imp, export))
			if err != nil {
				t.Fatal(err)
			}
			if got := have.Endpoints[0].Pod; got != tc.want {
				t.Errorf("have %q, want %q", got, tc.want)
			}
			if ref := broker.Endpoints[0].TargetRef; ref != nil && (ref.Namespace != "" || ref.UID != "") {
				t.Errorf("more than the name travels: %v", ref)
			}
		})
	}
	conformance.Holds(t, "N43")
	named, other := sourceSlice(), sourceSlice()
	named.Endpoints[1].TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "hello-x7f"}
	if mcs.SliceDigest(named) == mcs.SliceDigest(other) {
		t.Error("another pod is no change")
	}
}

// TestSlicesReachTheNode follows endpoints from their own cluster over the broker to a node of another.
func TestSlicesReachTheNode(t *testing.T) {
	source := sourceSlice()
	export := clusterset.Export{Cluster: "a.b", Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}, Ports: []clusterset.Port{
		{Name: "web", Protocol: clusterset.TCP, Port: 80}, {Name: "dns", Protocol: clusterset.UDP, Port: 53},
	}}
	imp, _ := clusterset.Merge([]clusterset.Export{export})
	imported := mcs.ImportedSlice(mcs.BrokerSlice(source, "a.b"), imp, export)
	have, name, err := mcs.Slice(imported)
	if err != nil {
		t.Fatal(err)
	}
	want := clusterset.Slice{
		Name: imported.Name, Cluster: "a.b", Family: clusterset.IPv4,
		Ports: []clusterset.EndpointPort{
			{Name: "dns", Protocol: clusterset.UDP, Port: 5353}, {Name: "web", Protocol: clusterset.TCP, Port: 8080},
		},
		Endpoints: []clusterset.Endpoint{
			{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Ready: true, Serving: true},
			{Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}, Serving: true, Terminating: true, Hostname: "hello-0", NodeName: clusterset.Share("n1"), Zone: clusterset.Share("z1")},
		},
	}
	if diff := cmp.Diff(want, have, sameAddr); diff != "" {
		t.Errorf("(-want +have):\n%s", diff)
	}
	conformance.Holds(t, "L71")
	if name != export.Service {
		t.Errorf("service %s", name)
	}
	if e := imported.Endpoints[0]; e.Hints == nil || e.TargetRef != nil {
		t.Errorf("imported endpoint %+v", e)
	}
	if _, ok := imported.Labels[discoveryv1.LabelServiceName]; ok {
		t.Error("the imported slice joins the member's own service")
	}
	if diff := cmp.Diff(sourceSlice(), source); diff != "" {
		t.Errorf("the source changed:\n%s", diff)
	}
}

// The region of each zone follows the endpoints from their own cluster over the broker to a node of another.
func TestRegionsReachTheNode(t *testing.T) {
	known := map[string]string{"z1": "r1", "z2": "r2", "": "r3", "elsewhere": "r4"}
	source := sourceSlice()
	source.Endpoints = append(source.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.0.0.3"}, Zone: new("unknown")})
	export := clusterset.Export{Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "hello"}}
	imp, _ := clusterset.Merge([]clusterset.Export{export})
	broker := mcs.BrokerSlice(source, "a")
	without := mcs.SliceDigest(broker)
	mcs.SetRegions(broker, func(zone string) string { return known[zone] })
	if have := broker.Annotations["isthmus.dev/regions"]; have != "=r3,z1=r1" {
		t.Errorf("the exported slice has the regions %q", have)
	}
	if mcs.SliceDigest(broker) == without {
		t.Error("regions are no change of a slice")
	}
	packed := mcs.Pack(broker)
	unpacked := packed.Unpack()
	if mcs.SliceDigest(unpacked) != mcs.SliceDigest(broker) || len(packed.Omitted) > 0 {
		t.Errorf("packing changed the slice to %v, without %v", unpacked.Annotations, packed.Omitted)
	}
	if bytes := packed.Bytes() - mcs.Pack(mcs.BrokerSlice(source, "a")).Bytes(); bytes != len("=r3,z1=r1") {
		t.Errorf("regions count as %d bytes of the member's quota", bytes)
	}
	if stub := packed.Stub(); stub.Bytes() != packed.Bytes() || len(stub.Unpack().Annotations) > 0 {
		t.Errorf("a stub has %d bytes and the annotations %v", stub.Bytes(), stub.Unpack().Annotations)
	}
	have, _, err := mcs.Slice(mcs.ImportedSlice(unpacked, imp, export))
	if err != nil {
		t.Fatal(err)
	}
	for zone, want := range map[string]string{"z1": "r1", "": "r3", "z2": "", "unknown": ""} {
		if region := have.Regions.InZone(zone); region != want {
			t.Errorf("zone %q is in region %q, want %q", zone, region, want)
		}
	}
	mcs.SetRegions(broker, func(string) string { return "" })
	if len(broker.Annotations) > 0 {
		t.Errorf("a slice of unknown regions has the annotations %v", broker.Annotations)
	}
}

func TestImportedSliceHasOnlyPortsThatItsMemberExposes(t *testing.T) {
	name := clusterset.ServiceName{Namespace: "demo", Name: "hello"}
	ports := func(cluster clusterset.ClusterID, ports ...clusterset.Port) clusterset.Export {
		return clusterset.Export{Cluster: cluster, Service: name, ExportedAt: time.Unix(int64(cluster[0]), 0), Ports: ports}
	}
	older := ports("a", clusterset.Port{Name: "web", Protocol: clusterset.TCP, Port: 42})
	younger := ports("b", clusterset.Port{Name: "web", Protocol: clusterset.TCP, Port: 4242}, clusterset.Port{Name: "dns", Protocol: clusterset.UDP, Port: 53})
	imp, _ := clusterset.Merge([]clusterset.Export{older, younger})
	for name, tc := range map[string]struct {
		from clusterset.Export
		want []string
	}{
		"the winner of a conflict":      {older, []string{"web"}},
		"the loser keeps its other one": {younger, []string{"dns"}},
	} {
		t.Run(name, func(t *testing.T) {
			var have []string
			for _, p := range mcs.ImportedSlice(mcs.BrokerSlice(sourceSlice(), tc.from.Cluster), imp, tc.from).Ports {
				have = append(have, *p.Name)
			}
			if diff := cmp.Diff(tc.want, have); diff != "" {
				t.Errorf("ports (-want +have):\n%s", diff)
			}
		})
	}
	conformance.Holds(t, "N29")
}

func TestSliceNamesObjectAndField(t *testing.T) {
	for name, tc := range map[string]struct {
		edit  func(*discoveryv1.EndpointSlice)
		field string
	}{
		"no service":   {func(es *discoveryv1.EndpointSlice) { delete(es.Labels, v1beta1.LabelServiceName) }, v1beta1.LabelServiceName},
		"no cluster":   {func(es *discoveryv1.EndpointSlice) { delete(es.Labels, v1beta1.LabelSourceCluster) }, v1beta1.LabelSourceCluster},
		"FQDN":         {func(es *discoveryv1.EndpointSlice) { es.AddressType = discoveryv1.AddressTypeFQDN }, "addressType"},
		"port":         {func(es *discoveryv1.EndpointSlice) { es.Ports[0].Port = new(int32(70000)) }, "ports[0]"},
		"no address":   {func(es *discoveryv1.EndpointSlice) { es.Endpoints[1].Addresses = []string{"pod"} }, "endpoints[1].addresses[0]"},
		"other family": {func(es *discoveryv1.EndpointSlice) { es.Endpoints[1].Addresses = []string{"fd00::1"} }, "endpoints[1].addresses[0]"},
	} {
		t.Run(name, func(t *testing.T) {
			es := sourceSlice()
			es.Labels = map[string]string{v1beta1.LabelServiceName: "hello", v1beta1.LabelSourceCluster: "a"}
			tc.edit(es)
			_, _, err := mcs.Slice(es)
			if err == nil || !strings.Contains(err.Error(), "endpoint slice demo/hello-abcde: ") || !strings.Contains(err.Error(), tc.field) {
				t.Errorf("error %v does not name %s", err, tc.field)
			}
		})
	}
}

func TestConflicts(t *testing.T) {
	if c := mcs.Conflicts(nil); c.Status != metav1.ConditionFalse || c.Reason != "NoConflicts" {
		t.Errorf("no conflict: %+v", c)
	}
	c := mcs.Conflicts([]clusterset.Conflict{
		{Field: clusterset.ConflictPorts, Winner: "a", Losers: []clusterset.ClusterID{"b"}, Clusters: 2},
		{Field: clusterset.ConflictType, Winner: "a", Losers: []clusterset.ClusterID{"b"}, Clusters: 2},
	})
	if c.Status != metav1.ConditionTrue || c.Reason != "PortConflict,TypeConflict" || strings.Count(c.Message, "\n") != 1 {
		t.Errorf("two conflicts: %+v", c)
	}
	// Every conflict has a reason of its own.
	seen := map[string]bool{}
	for f := clusterset.ConflictPorts; f <= clusterset.ConflictAnnotations; f++ {
		c := mcs.Conflicts([]clusterset.Conflict{{Field: f, Winner: "a", Losers: []clusterset.ClusterID{"b"}, Clusters: 2}})
		if seen[c.Reason] || !strings.HasSuffix(c.Reason, "Conflict") {
			t.Errorf("%s has the reason %s", f, c.Reason)
		}
		seen[c.Reason] = true
	}
}

func TestImportIsPendingWithoutVIP(t *testing.T) {
	imp := clusterset.Import{Type: clusterset.ClusterSetIP}
	if c := mcs.ServiceImport(imp).Status.Conditions[0]; c.Status != metav1.ConditionFalse || c.Reason != "Pending" {
		t.Errorf("condition %+v", c)
	}
	imp.Type = clusterset.Headless
	if c := mcs.ServiceImport(imp).Status.Conditions[0]; c.Status != metav1.ConditionTrue {
		t.Errorf("headless: condition %+v", c)
	}
}

// Values without effect are named in the condition Ready.
func TestIgnored(t *testing.T) {
	export := func(choice string) *v1beta1.ServiceExport {
		return &v1beta1.ServiceExport{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{v1alpha1.AnnotationUseClusterSetIP: choice}}}
	}
	slice := func(name string, t discoveryv1.AddressType) discoveryv1.EndpointSlice {
		return discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, AddressType: t}
	}
	for _, choice := range []string{"true", "false", "1"} {
		if have := mcs.Ignored(export(choice), []discoveryv1.EndpointSlice{slice("v4", discoveryv1.AddressTypeIPv4)}); len(have) > 0 {
			t.Errorf("%s: %v", choice, have)
		}
	}
	if have := mcs.Ignored(&v1beta1.ServiceExport{}, nil); len(have) > 0 {
		t.Errorf("without an annotation: %v", have)
	}
	have := mcs.Ignored(export("yes"), []discoveryv1.EndpointSlice{slice("z", discoveryv1.AddressTypeFQDN), slice("b", discoveryv1.AddressTypeFQDN)})
	c := mcs.ExportedWithout(nil, mcs.Shortcomings{Ignored: have})
	want := `exported to the clusterset, ignoring EndpointSlice b: addressType FQDN has host names; clusters share IPv4 and IPv6 addresses only, ` +
		`EndpointSlice z: addressType FQDN has host names; clusters share IPv4 and IPv6 addresses only, ` +
		`metadata.annotations[lighthouse.submariner.io/use-clusterset-ip]: "yes" is neither true nor false`
	if c.Status != metav1.ConditionTrue || c.Reason != string(mcs.ReasonValueIgnored) || c.Message != want {
		t.Errorf("%s %s: %s", c.Status, c.Reason, c.Message)
	}
}
