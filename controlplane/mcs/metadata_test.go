package mcs

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"pgregory.net/rapid"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// text draws short strings of the characters that matter to names, and some others.
func text(most int) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		return string(rapid.SliceOfN(rapid.SampledFrom([]rune("aZ09-_./ é\n")), 0, most).Draw(t, "text"))
	})
}

// The checks of names agree with those of Kubernetes.
func TestNamesAsInKubernetes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := text(6).Draw(t, "s")
		if n := rapid.SampledFrom([]int{0, 0, 0, 62, 63, 250, 253}).Draw(t, "n"); n > 0 {
			s = strings.Repeat("a", n) + s
		}
		for name, check := range map[string]struct {
			ours   func(string) bool
			theirs func(string) []string
		}{
			"label value":    {isLabelValue, validation.IsValidLabelValue},
			"qualified name": {isQualifiedName, func(s string) []string { return validation.IsQualifiedName(s) }},
			"subdomain":      {isSubdomain, validation.IsDNS1123Subdomain},
			"label":          {isHostname, validation.IsDNS1123Label},
		} {
			if ours, theirs := check.ours(s), check.theirs(s); ours != (len(theirs) == 0) {
				t.Fatalf("%s %q: %t here, in Kubernetes %v", name, s, ours, theirs)
			}
		}
	})
}

// Kubernetes accepts whatever metadata is kept, with what Isthmus adds to it, and what is dropped is named.
func TestKeptMetadataIsValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		labels := rapid.MapOfN(text(8), text(8), 0, 6).Draw(t, "labels")
		annotations := rapid.MapOfN(text(8), text(8), 0, 6).Draw(t, "annotations")
		var omitted omissions
		e := clusterset.Export{
			Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}, Type: clusterset.Headless,
			Labels: omitted.labels("labels", labels), Annotations: omitted.annotations("annotations", annotations),
		}
		if kept := len(e.Labels) + len(e.Annotations) + len(omitted); kept != len(labels)+len(annotations) {
			t.Fatalf("%d of %d entries are kept or named: %v", kept, len(labels)+len(annotations), omitted)
		}
		imp, _ := clusterset.Merge([]clusterset.Export{e})
		si := ServiceImport(imp)
		if errs := apivalidation.ValidateObjectMeta(&si.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata")); len(errs) > 0 {
			t.Fatal(errs)
		}
	})
}

func entries(n int, value string) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf("key-%03d", i)] = value
	}
	return m
}

func TestOmittedMetadata(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		labels, annotations map[string]string
		kept                []string // keys
		omitted             []string // parts of the omissions
	}{
		"valid":           {labels: map[string]string{"team": "shop"}, annotations: map[string]string{"note": "my shop"}, kept: []string{"note", "team"}},
		"a space":         {labels: map[string]string{"note": "my shop", "team": "shop"}, kept: []string{"team"}, omitted: []string{`labels[note]: the value "my shop" is not a label value`}},
		"reserved":        {labels: map[string]string{"isthmus.dev/service-name": "x"}, omitted: []string{"labels[isthmus.dev/service-name]: the key is reserved"}},
		"a subdomain":     {annotations: map[string]string{"federation.isthmus.dev/epoch": "x"}, omitted: []string{"the key is reserved"}},
		"another domain":  {annotations: map[string]string{"notisthmus.dev/epoch": "x"}, kept: []string{"notisthmus.dev/epoch"}},
		"policies":        {annotations: map[string]string{clusterset.AnnotationPrefer: "node"}, kept: []string{clusterset.AnnotationPrefer}},
		"but no label":    {labels: map[string]string{clusterset.AnnotationPrefer: "node"}, omitted: []string{"reserved"}},
		"of kube-proxy":   {labels: map[string]string{discoveryv1.LabelServiceName: "dns"}, omitted: []string{"reserved"}},
		"of ownership":    {labels: map[string]string{v1alpha1.LabelManagedBy: "x"}, omitted: []string{"reserved"}},
		"too many":        {labels: entries(MaxLabels+9, "x"), kept: slices.Sorted(maps.Keys(entries(MaxLabels, "x"))), omitted: []string{"labels: has 73 entries; at most 64 are used"}},
		"too large":       {annotations: entries(3, strings.Repeat("x", MaxAnnotationBytes/2-10)), kept: []string{"key-000", "key-001"}, omitted: []string{"annotations[key-002]: the annotations have more than 65536 bytes"}},
		"a very long key": {labels: map[string]string{strings.Repeat("k", 10_000): "x"}, omitted: []string{"the key is not a label key"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var omitted omissions
			labels, annotations := omitted.labels("labels", test.labels), omitted.annotations("annotations", test.annotations)
			kept := slices.Sorted(maps.Keys(labels))
			kept = slices.Sorted(slices.Values(append(kept, slices.Collect(maps.Keys(annotations))...)))
			if diff := cmp.Diff(test.kept, kept); diff != "" {
				t.Errorf("kept (-want +have):\n%s", diff)
			}
			if len(omitted) != len(test.omitted) {
				t.Fatalf("omitted: %v", omitted)
			}
			for i, o := range omitted {
				if !strings.Contains(o.Error(), test.omitted[i]) || len(o.Error()) > 400 {
					t.Errorf("omission %q, want %q in it", o, test.omitted[i])
				}
			}
		})
	}
}

// A record that no policy has checked cannot make an import invalid: ParseRecord refuses it, or omits the part.
func TestHostileRecord(t *testing.T) {
	t.Parallel()
	type record = v1alpha1.ExportRecord
	for name, test := range map[string]struct {
		edit    func(*record)
		refused bool
		omitted string
	}{
		"port 0":          {edit: func(r *record) { r.Spec.Import.Ports[0].Port = 0 }, refused: true},
		"port 65536":      {edit: func(r *record) { r.Spec.Import.Ports[0].Port = 65536 }, refused: true},
		"port name":       {edit: func(r *record) { r.Spec.Import.Ports[0].Name = "my port" }, refused: true},
		"appProtocol":     {edit: func(r *record) { r.Spec.Import.Ports[0].AppProtocol = new("h2c or so") }, refused: true},
		"protocol":        {edit: func(r *record) { r.Spec.Import.Ports[0].Protocol = "ICMP" }, refused: true},
		"many ports":      {edit: func(r *record) { r.Spec.Import.Ports = make([]v1beta1.ServicePort, MaxPorts+1) }, refused: true},
		"affinity":        {edit: func(r *record) { r.Spec.Import.SessionAffinity = "Cookie" }, refused: true},
		"family":          {edit: func(r *record) { r.Spec.Import.IPFamilies = []corev1.IPFamily{"IPX"} }, refused: true},
		"type":            {edit: func(r *record) { r.Spec.Import.Type = "LoadBalancer" }, refused: true},
		"three addresses": {edit: func(r *record) { r.Spec.IPs = []string{"243.0.0.1", "fd00::1", "243.0.0.2"} }, refused: true},
		"loopback":        {edit: func(r *record) { r.Spec.IPs = []string{"127.0.0.1"} }, refused: true},
		"a name with a dot": {edit: func(r *record) {
			r.Spec.Name, r.Name, r.Labels[v1alpha1.LabelServiceName] = "b.web", "a.b.web.demo", "b.web"
		}, refused: true},
		"a wild namespace": {edit: func(r *record) {
			r.Spec.Namespace, r.Name, r.Labels[v1alpha1.LabelServiceNamespace] = "d e", "a.web.d e", "d e"
		}, refused: true},
		"traffic policy": {edit: func(r *record) {
			r.Spec.Import.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicy("Remote"))
		}, omitted: "spec.import.internalTrafficPolicy"},
		"distribution":        {edit: func(r *record) { r.Spec.Import.TrafficDistribution = new("prefer me") }, omitted: "spec.import.trafficDistribution"},
		"labels":              {edit: func(r *record) { r.Spec.ExportedLabels = map[string]string{"note": "my shop"} }, omitted: "spec.exportedLabels"},
		"annotations":         {edit: func(r *record) { r.Spec.ExportedAnnotations = map[string]string{"a note": "x"} }, omitted: "spec.exportedAnnotations"},
		"labels of a service": {edit: func(r *record) { r.Spec.ServiceLabels = map[string]string{"bad key!": "x"} }, omitted: "spec.serviceLabels"},
		"large labels":        {edit: func(r *record) { r.Spec.ServiceLabels = map[string]string{"k": strings.Repeat("x", 1<<20)} }, omitted: "spec.serviceLabels"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := ExportRecord(clusterset.Export{
				Cluster: "a", Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}, Type: clusterset.ClusterSetIP,
				Ports: []clusterset.Port{{Name: "http", Protocol: clusterset.TCP, Port: 80}},
			})
			test.edit(r)
			e, omitted, err := ParseRecord(r)
			if (err != nil) != test.refused {
				t.Fatalf("refused: %v", err)
			}
			if test.refused {
				return
			}
			if len(omitted) != 1 || omitted[0].Kind() != test.omitted {
				t.Errorf("omitted %v, want %s", omitted, test.omitted)
			}
			if len(e.Labels)+len(e.Annotations)+len(e.ServiceLabels) > 0 || e.InternalTrafficPolicy+e.TrafficDistribution != "" {
				t.Errorf("it is believed: %+v", e)
			}
		})
	}
}

// A slice of the broker keeps its endpoints whatever else it claims.
func TestHostileSlice(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*discoveryv1.EndpointSlice, *discoveryv1.Endpoint){
		"endpoints.zone":     func(_ *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) { e.Zone = new(strings.Repeat("z", 1<<20)) },
		"endpoints.nodeName": func(_ *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) { e.NodeName = new("a node") },
		"endpoints.hostname": func(_ *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) { e.Hostname = new("a.b") },
		"endpoints.targetRef.name": func(_ *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) {
			e.TargetRef = &corev1.ObjectReference{Kind: kindPod, Name: "x y"}
		},
		"endpoints.hints": func(_ *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint) {
			e.Hints = &discoveryv1.EndpointHints{ForZones: make([]discoveryv1.ForZone, 9)}
		},
		"ports.port": func(es *discoveryv1.EndpointSlice, _ *discoveryv1.Endpoint) {
			es.Ports = append(es.Ports, discoveryv1.EndpointPort{Port: new(int32(0))})
		},
		"ports": func(es *discoveryv1.EndpointSlice, _ *discoveryv1.Endpoint) {
			for i := range MaxPorts {
				es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprint("p", i)), Port: new(int32(i + 1))})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			es := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Name: "x", Labels: ownerLabels("a", clusterset.ServiceName{Namespace: "demo", Name: "web"})}, AddressType: discoveryv1.AddressTypeIPv4,
				Ports:     []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(80))}},
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
			}
			edit(es, &es.Endpoints[0])
			p := Pack(es)
			if len(p.Omitted) != 1 || p.Omitted[0].Field != name {
				t.Errorf("omitted %v", p.Omitted)
			}
			unpacked := p.Unpack()
			e := unpacked.Endpoints[0]
			if e.Addresses[0] != "10.0.0.1" || e.Zone != nil || e.NodeName != nil || e.Hostname != nil || e.TargetRef != nil || e.Hints != nil ||
				len(unpacked.Ports) > MaxPorts || *unpacked.Ports[len(unpacked.Ports)-1].Port < 1 {
				t.Errorf("unpacked %+v, %d ports", e, len(unpacked.Ports))
			}
		})
	}
}

// A slice states regions in the one form of the annotation, and only those of its own zones count.
func TestHostileRegions(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 64)
	for name, test := range map[string]struct {
		text, kept string
		omitted    bool
	}{
		"none":                      {},
		"all":                       {text: "=r2,z1=r1", kept: "=r2,z1=r1"},
		"in another order":          {text: "z1=r1,=r2", kept: "=r2,z1=r1"},
		"of a zone elsewhere":       {text: "z1=r1,z9=r9", kept: "z1=r1"},
		"only of a zone elsewhere":  {text: "z9=r9"},
		"without a region":          {text: "z1=", omitted: true},
		"without a sign":            {text: "z1", omitted: true},
		"with two signs":            {text: "z1=r1=r2", omitted: true},
		"twice":                     {text: "z1=r1,z1=r2", omitted: true},
		"with an end":               {text: "z1=r1,", omitted: true},
		"with a space":              {text: "z1=r1, =r2", omitted: true},
		"a long zone":               {text: long + "=r1", omitted: true},
		"a long region":             {text: "z1=" + long, omitted: true},
		"a newline":                 {text: "z1=r1\n", omitted: true},
		"too many":                  {text: "z1=r1" + strings.Repeat(",z9=r9", MaxRegionBytes/6), omitted: true},
		"far too many, and no more": {text: strings.Repeat("z", 1<<20), omitted: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			es := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: "x", Labels: ownerLabels("a", clusterset.ServiceName{Namespace: "demo", Name: "web"}),
					Annotations: map[string]string{v1alpha1.AnnotationRegions: test.text},
				},
				AddressType: discoveryv1.AddressTypeIPv4,
				Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, Zone: new("z1")}, {Addresses: []string{"10.0.0.2"}}},
			}
			p := Pack(es)
			if kept := p.Unpack().Annotations[v1alpha1.AnnotationRegions]; kept != test.kept {
				t.Errorf("kept %q, want %q", kept, test.kept)
			}
			if (len(p.Omitted) == 1) != test.omitted || test.omitted && (p.Omitted[0].Kind() != "metadata.annotations" || len(p.Omitted[0].Error()) > 300) {
				t.Errorf("omitted %v", p.Omitted)
			}
			imp := clusterset.Import{Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}}
			if kept := ImportedSlice(es, imp, clusterset.Export{Cluster: "a"}).Annotations[v1alpha1.AnnotationRegions]; kept != test.kept {
				t.Errorf("imported %q, want %q", kept, test.kept)
			}
		})
	}
}

// However many zones a slice has, importers accept its regions.
func TestRegionsStayWithinTheirBound(t *testing.T) {
	t.Parallel()
	es := &discoveryv1.EndpointSlice{}
	for i := range 1000 {
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, Zone: new(fmt.Sprintf("z%062d", i))})
	}
	SetRegions(es, func(string) string { return strings.Repeat("r", 63) })
	if p := Pack(es); len(p.Omitted) > 0 || p.regions.InZone(fmt.Sprintf("z%062d", 30)) == "" {
		t.Errorf("omitted %v, and have %d bytes of regions", p.Omitted, len(p.regions.String()))
	}
}

// Any member may write the ports of an aggregate, and an older broker lets any member write the rest. None of it stops the
// Service.
func TestHostileAggregate(t *testing.T) {
	t.Parallel()
	good := clusterset.Aggregate{Service: clusterset.ServiceName{Namespace: "demo", Name: "web"}, Type: clusterset.ClusterSetIP, Clusters: []clusterset.ClusterID{"a"}}
	si := Aggregate(good)
	si.Spec.Ports = []v1beta1.ServicePort{{Port: 0}, {Port: 65536, Protocol: "ICMP"}}
	si.Spec.SessionAffinity = "Cookie"
	if a, omitted, err := ParseAggregate(si); err != nil || len(omitted) > 0 || !cmp.Equal(a, good) {
		t.Errorf("an aggregate with wild ports: %+v, %v, %v", a, omitted, err)
	}
	si.Spec.IPs = []string{"127.0.0.1"}
	si.Status.Clusters = append(si.Status.Clusters, v1beta1.ClusterStatus{Cluster: "not an id"})
	si.Annotations = map[string]string{v1alpha1.AnnotationAllocatedBy: "no id"}
	a, omitted, err := ParseAggregate(si)
	if err != nil || len(omitted) != 3 || !cmp.Equal(a, good) {
		t.Errorf("an aggregate with wild content: %+v, %v, %v", a, omitted, err)
	}
	// An invalid extender costs nothing but itself.
	for _, by := range []string{"", "no id", strings.Repeat("x", 70_000)} {
		si.Annotations = map[string]string{v1alpha1.AnnotationAllocatedBy: "a", v1alpha1.AnnotationExtendedBy: by}
		a, omitted, err = ParseAggregate(si)
		if err != nil || len(omitted) != 3 || a.AllocatedBy != "a" || a.ExtendedBy != "" {
			t.Errorf("an aggregate with a wild extender: %+v, %v, %v", a, omitted, err)
		}
	}
}
