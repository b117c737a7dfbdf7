package access_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// many returns n labels or annotations.
func many(n int, value string) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf("key-%d", i)] = value
	}
	return m
}

// ports returns n distinct ports of a record.
func ports(n int) []v1beta1.ServicePort {
	var all []v1beta1.ServicePort
	for i := range n {
		all = append(all, v1beta1.ServicePort{Name: fmt.Sprintf("port-%d", i), Protocol: corev1.ProtocolTCP, Port: int32(i + 1), AppProtocol: new("example.com/h2c")})
	}
	return all
}

// attacksOnFields are objects of a's own with a field that would harm their importers.
func (b *broker) attacksOnFields() map[string]attack {
	type record = isthmus.ExportRecord
	all := map[string]attack{}
	try := func(name string, edit func(*record), because string) {
		all["record: "+name] = attack{do: create(alter(b.record("a", "fresh", "demo"), edit)), because: because}
	}
	const (
		noLabel  = `spec.exportedLabels or spec.serviceLabels has a key or value that no label can have`
		reserved = `has a reserved key, which has an effect on imports`
		noKey    = `spec.exportedAnnotations has a key that no annotation can have`
		badPort  = `spec.import.ports has a number that is not in 1..65535`
	)
	for name, label := range map[string][2]string{
		"value with a space":       {"note", "my shop"},
		"key with a space":         {"a note", "shop"},
		"empty key":                {"", "shop"},
		"key that is a prefix":     {"example.com/", "shop"},
		"key without a prefix":     {"/note", "shop"},
		"key with two slashes":     {"example.com/a/b", "shop"},
		"prefix in capitals":       {"Example.com/note", "shop"},
		"prefix with a hole":       {"example..com/note", "shop"},
		"key that ends in a dash":  {"note-", "shop"},
		"long name":                {strings.Repeat("n", 64), "shop"},
		"long prefix":              {strings.Repeat("p", 254) + "/n", "shop"},
		"value that ends in a dot": {"note", "shop."},
		"unicode key":              {"nоte", "shop"},
		"unicode value":            {"note", "ѕhop"},
		"newline":                  {"note", "shop\n"},
	} {
		try("exportedLabels: "+name, func(r *record) { r.Spec.ExportedLabels = map[string]string{label[0]: label[1]} }, noLabel)
		try("serviceLabels: "+name, func(r *record) { r.Spec.ServiceLabels = map[string]string{label[0]: label[1]} }, noLabel)
	}
	for _, key := range []string{
		"isthmus.dev/cluster", "isthmus.dev/service-name", "federation.isthmus.dev/epoch", "kubernetes.io/service-name", "app.kubernetes.io/managed-by",
		"endpointslice.kubernetes.io/managed-by", "multicluster.kubernetes.io/service-name", "multicluster.kubernetes.io/source-cluster",
		"service.kubernetes.io/headless", "multicluster.x-k8s.io/x", "lighthouse.submariner.io/sourceNamespace", "kubectl.kubernetes.io/x",
	} {
		try("exportedLabels: reserved "+key, func(r *record) { r.Spec.ExportedLabels = map[string]string{key: "x"} }, reserved)
		try("serviceLabels: reserved "+key, func(r *record) { r.Spec.ServiceLabels = map[string]string{key: "x"} }, reserved)
		try("exportedAnnotations: reserved "+key, func(r *record) { r.Spec.ExportedAnnotations = map[string]string{key: "x"} }, reserved)
	}
	for name, key := range map[string]string{"with a space": "a note", "empty": "", "with two slashes": "a/b/c", "long": strings.Repeat("n", 64), "a reserved one in capitals": "ISTHMUS.dev/changed-at"} {
		because := noKey
		if name == "a reserved one in capitals" {
			because = reserved
		}
		try("exportedAnnotations: key "+name, func(r *record) { r.Spec.ExportedAnnotations = map[string]string{key: "x"} }, because)
	}
	try("exportedAnnotations: the choice of an address", func(r *record) {
		r.Spec.ExportedAnnotations = map[string]string{isthmus.AnnotationUseClusterSetIP: "false"}
	}, reserved)
	try("exportedAnnotations: too large together", func(r *record) { r.Spec.ExportedAnnotations = many(2, strings.Repeat("x", 33_000)) }, `it may have at most 65536`)
	try("exportedAnnotations: one too large", func(r *record) { r.Spec.ExportedAnnotations = many(1, strings.Repeat("x", 65_537)) }, `values 65536`)
	try("exportedAnnotations: too many", func(r *record) { r.Spec.ExportedAnnotations = many(65, "x") }, `must have at most 64 items`)
	try("exportedLabels: too many", func(r *record) { r.Spec.ExportedLabels = many(65, "x") }, `must have at most 64 items`)
	try("serviceLabels: too many", func(r *record) { r.Spec.ServiceLabels = many(65, "x") }, `must have at most 64 items`)
	try("serviceLabels: a long value", func(r *record) { r.Spec.ServiceLabels = many(1, strings.Repeat("x", 64)) }, `values 63`)
	try("serviceLabels: a long key", func(r *record) { r.Spec.ServiceLabels = map[string]string{strings.Repeat("x", 318): "x"} }, `keys have at most 317`)
	try("annotation of another", func(r *record) { r.Annotations = map[string]string{"argocd.argoproj.io/sync": "x"} }, `metadata.annotations may have only these keys`)
	try("a long annotation", func(r *record) {
		r.Annotations = map[string]string{isthmus.AnnotationChangedAt: strings.Repeat("1", 65)}
	}, `metadata.annotations may have only these keys`)
	for name, edit := range map[string]func(*v1beta1.ServicePort){
		"0":                        func(p *v1beta1.ServicePort) { p.Port = 0 },
		"65536":                    func(p *v1beta1.ServicePort) { p.Port = 65536 },
		"negative":                 func(p *v1beta1.ServicePort) { p.Port = -1 },
		"of another protocol":      func(p *v1beta1.ServicePort) { p.Protocol = "ICMP" },
		"with a name with a space": func(p *v1beta1.ServicePort) { p.Name = "my port" },
		"with a name in capitals":  func(p *v1beta1.ServicePort) { p.Name = "HTTP" },
		"with a long name":         func(p *v1beta1.ServicePort) { p.Name = strings.Repeat("n", 64) },
		"with an appProtocol":      func(p *v1beta1.ServicePort) { p.AppProtocol = new("h2c or so") },
		"with a long appProtocol":  func(p *v1beta1.ServicePort) { p.AppProtocol = new(strings.Repeat("n", 64)) },
	} {
		try("port "+name, func(r *record) { edit(&r.Spec.Import.Ports[0]) }, badPort)
	}
	try("too many ports", func(r *record) { r.Spec.Import.Ports = ports(1001) }, `a service may have at most 1000 ports`)
	try("affinity", func(r *record) { r.Spec.Import.SessionAffinity = "Cookie" }, `spec.import.sessionAffinity must be None or ClientIP`)
	try("affinity for ever", func(r *record) {
		r.Spec.Import.SessionAffinity = corev1.ServiceAffinityClientIP
		r.Spec.Import.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(86_401))}}
	}, `with a timeout of 1 to 86400 seconds`)
	try("traffic policy", func(r *record) {
		r.Spec.Import.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicy("Remote"))
	}, `must be Cluster or Local`)
	try("traffic distribution", func(r *record) { r.Spec.Import.TrafficDistribution = new("Prefer me") }, `a name such as PreferClose`)
	try("type", func(r *record) { r.Spec.Import.Type = "LoadBalancer" }, `Unsupported value: "LoadBalancer"`)
	try("families", func(r *record) { r.Spec.Import.IPFamilies = []corev1.IPFamily{"IPv4", "IPv4"} }, `each at most once`)
	try("a family", func(r *record) { r.Spec.Import.IPFamilies = []corev1.IPFamily{"IPX"} }, `each at most once`)
	try("three addresses", func(r *record) { r.Spec.IPs = []string{"243.0.0.8", "243.0.0.9", "fd00::1"} }, `must have at most 2 items`)
	try("no address", func(r *record) { r.Spec.IPs = []string{"example.com"} }, `spec.ips must be addresses`)
	try("loopback", func(r *record) { r.Spec.IPs = []string{"127.0.0.1"} }, `spec.ips must be addresses`)
	try("an address in another form", func(r *record) { r.Spec.IPs = []string{"fd00::0:1"} }, `in canonical form`)
	try("a long address", func(r *record) { r.Spec.IPs = []string{strings.Repeat("1", 46)} }, `may not be more than 45 bytes`)
	try("addresses in the import", func(r *record) { r.Spec.Import.IPs = []string{"243.0.0.8"} }, `spec.import.ips must be empty`)

	type slice = discoveryv1.EndpointSlice
	tryOn := func(name string, edit func(*slice), because string) {
		all["slice: "+name] = attack{do: create(alter(b.slice("a", "fresh", "demo", "10.0.0.7"), edit)), because: because}
	}
	tryOn("a zone of many words", func(s *slice) { s.Endpoints[0].Zone = new("a zone") }, `endpoints.zone has`)
	tryOn("a long zone", func(s *slice) { s.Endpoints[0].Zone = new(strings.Repeat("z", 64)) }, `endpoints.zone has`)
	tryOn("a target that is no pod", func(s *slice) { s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: "Secret", Name: "x"} }, `endpoints.targetRef must have the kind Pod`)
	tryOn("a target with a long name", func(s *slice) {
		s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: strings.Repeat("x", 254)}
	}, `endpoints.targetRef must have`)
	tryOn("a target with a wild name", func(s *slice) { s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "x y"} }, `endpoints.targetRef must have`)
	tryOn("a target elsewhere", func(s *slice) {
		s.Endpoints[0].TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: "x", Namespace: "kube-system"}
	}, `endpoints.targetRef must have`)
	tryOn("too many ports", func(s *slice) {
		for i := range 1001 {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprintf("port-%d", i)), Port: new(int32(i + 1))})
		}
	}, `ports has more than 1000 entries`)
	tryOn("port 0", func(s *slice) { s.Ports[0].Port = new(int32(0)) }, `ports has a number that is not in 1..65535`)
	tryOn("port 65536", func(s *slice) { s.Ports[0].Port = new(int32(65536)) }, `ports has a number that is not in 1..65535`)
	tryOn("a hostname of two parts", func(s *slice) { s.Endpoints[0].Hostname = new("a.b") }, `hostname: Invalid value`)
	tryOn("annotation of another", func(s *slice) { s.Annotations = map[string]string{"endpoints.kubernetes.io/over-capacity": "x"} }, `metadata.annotations may have only these keys`)
	tryOn("a large annotation", func(s *slice) {
		s.Annotations = map[string]string{isthmus.AnnotationChangedAt: strings.Repeat("1", 100_000)}
	}, `metadata.annotations may have only these keys`)
	tryOn("large regions", func(s *slice) {
		s.Annotations = map[string]string{isthmus.AnnotationRegions: "z=r" + strings.Repeat(",z=r", mcs.MaxRegionBytes/4)}
	}, `metadata.annotations may have only these keys`)
	for name, text := range map[string]string{
		"without a region": "z=", "without a zone": "r", "with a space": "z=r, y=r", "with an end": "z=r,", "with two signs": "z=r=q", "with a newline": "z=r\n", "empty": "",
	} {
		tryOn("regions "+name, func(s *slice) { s.Annotations = map[string]string{isthmus.AnnotationRegions: text} }, `annotation isthmus.dev/regions must have pairs`)
	}

	type aggregate = v1beta1.ServiceImport
	agreeing := func(name string, edit func(*aggregate), because string) {
		all["aggregate: "+name] = attack{do: create(alter(b.aggregate("fresh", "demo", "a", "243.0.0.8"), edit)), because: because}
	}
	agreeing("port 0", func(s *aggregate) { s.Spec.Ports = []v1beta1.ServicePort{{Port: 0}} }, `spec.ports has more than 16 entries, a number`)
	agreeing("many ports", func(s *aggregate) { s.Spec.Ports = ports(17) }, `spec.ports has more than 16 entries, a number`)
	agreeing("annotation of another", func(s *aggregate) { metav1.SetMetaDataAnnotation(&s.ObjectMeta, "example.com/x", "y") }, `metadata.annotations may have only these keys`)
	agreeing("a large annotation", func(s *aggregate) {
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, "example.com/x", strings.Repeat("1", 100_000))
	}, `metadata.annotations may have only these keys`)
	all["aggregate: ports of another's"] = attack{
		do:      update(b, b.aggregate("shop", "demo", "b", "243.2.0.1"), func(s *aggregate) { s.Spec.Ports = []v1beta1.ServicePort{{Port: 0}} }),
		because: `spec.ports has more than 16 entries, a number`,
	}
	return all
}

// The policies admit the largest objects that an export may have, within the budget of their expressions, and what Merge
// reads as a policy of the Service.
func TestLargestObjectsAreAdmitted(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	a := b.member("a")
	record := b.record("a", "large", "demo")
	record.Annotations = map[string]string{isthmus.AnnotationChangedAt: "1800000000000000000"}
	record.Spec.Import.Ports = ports(mcs.MaxPorts)
	record.Spec.ExportedLabels = map[string]string{}
	for i := range mcs.MaxLabels {
		record.Spec.ExportedLabels[fmt.Sprintf("%sexample.com/%s-%d", strings.Repeat("p.", 100), strings.Repeat("n", 55), i)] = strings.Repeat("v", 63)
	}
	record.Spec.ServiceLabels = record.Spec.ExportedLabels
	record.Spec.ExportedAnnotations = many(mcs.MaxLabels-3, strings.Repeat("x", 1000))
	for _, key := range []string{"isthmus.dev/prefer", "isthmus.dev/cluster-weights", "isthmus.dev/balancer"} {
		record.Spec.ExportedAnnotations[key] = "x"
	}
	es := b.slice("a", "large", "demo")
	es.Annotations = maps.Clone(record.Annotations)
	es.Ports = nil
	for i := range mcs.MaxPorts {
		es.Ports = append(es.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprintf("port-%d", i)), Protocol: new(corev1.ProtocolTCP), Port: new(int32(i + 1))})
	}
	es.Endpoints = nil
	for i := range 1000 {
		es.Endpoints = append(es.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250)}, NodeName: new(strings.Repeat("n", 63)), Zone: new(strings.Repeat("z", 63)),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: strings.Repeat("p", 253)},
		})
	}
	for i := range 40 {
		es.Endpoints[i].Zone = new(fmt.Sprintf("z%062d", i))
	}
	mcs.SetRegions(es, func(string) string { return strings.Repeat("r", 63) })
	if n := len(es.Annotations[isthmus.AnnotationRegions]); n < mcs.MaxRegionBytes-128 {
		t.Fatalf("only %d bytes of regions", n)
	}
	b.noError(a.Create(t.Context(), record))
	b.noError(a.Create(t.Context(), es))
	parsed, omitted, err := mcs.ParseRecord(record)
	if err != nil || len(omitted) > 0 || len(parsed.Labels) != mcs.MaxLabels || len(parsed.Annotations) != mcs.MaxLabels {
		t.Errorf("an admitted record is not believed: %v, %v", omitted, err)
	}
	if p := mcs.Pack(es); len(p.Omitted) > 0 || len(p.Unpack().Endpoints) != 1000 {
		t.Errorf("an admitted slice is not believed: %v", p.Omitted)
	}
}
