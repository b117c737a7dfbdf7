package bystanders

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
	"github.com/isthmus-net/isthmus/tools/hostile"
)

// attack is a known attempt to harm bystanders. It runs before any drawn object.
type attack struct {
	name    string
	cluster string // the tenant's; "" for the member crook on the broker
	objects func(*testbed) []client.Object
	says    []string // words that its author or an administrator must be able to read afterwards
}

// attacks are the known attacks.
var attacks = []attack{
	{"an import names the API server's address", "east", func(*testbed) []client.Object {
		return []client.Object{tenantImport(mischief, "server", "10.96.0.1", 443)}
	}, []string{"knows no import mischief/server"}},
	{"an import names an address elsewhere", "west", func(*testbed) []client.Object {
		return []client.Object{tenantImport(shop, "mine", "8.8.8.8", 443)}
	}, []string{"knows no import shop/mine"}},
	{"an import names a bystander's pod", "east", func(*testbed) []client.Object {
		return []client.Object{tenantImport(mischief, "pod", "10.101.0.1", 8080)}
	}, []string{"knows no import mischief/pod"}},
	{"an import with the controller's label names the API server's address", "east", func(*testbed) []client.Object {
		si := tenantImport(mischief, "labelled", "10.96.0.1", 443)
		si.Labels = map[string]string{v1alpha1.LabelManagedBy: managedBy}
		return []client.Object{si}
	}, []string{"managed-by"}},
	{"a foreign slice sends clients elsewhere", "west", func(*testbed) []client.Object {
		return []client.Object{&discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "foreign", Labels: map[string]string{
				v1beta1.LabelServiceName: "bystander-0", v1beta1.LabelSourceCluster: "east", discoveryv1.LabelManagedBy: "example.org",
			}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"8.8.8.8"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}},
			Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(80))}},
		}}
	}, nil},
	{"a Service has the name of a foreign import", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, foreign, nil)
	}, []string{"theirs"}},
	{"the oldest export has a label with a space", "west", func(*testbed) []client.Object {
		return []client.Object{elderExport(0, map[string]string{"note": "my shop"}, nil)}
	}, []string{"my shop"}},
	{"the oldest export has an invalid label key", "west", func(*testbed) []client.Object {
		return []client.Object{elderExport(1, map[string]string{"my key": "shop"}, nil)}
	}, []string{"my key"}},
	{"the oldest export has annotations of 260 KiB", "west", func(*testbed) []client.Object {
		return []client.Object{elderExport(0, nil, map[string]string{"example.org/large": strings.Repeat("x", 260<<10)})}
	}, nil},
	{"the oldest export has an invalid annotation key", "west", func(*testbed) []client.Object {
		return []client.Object{elderExport(1, nil, map[string]string{"our key": "shop"})}
	}, []string{"our key"}},
	{"the oldest export takes all clients", "west", func(*testbed) []client.Object {
		return []client.Object{elderExport(0, nil, map[string]string{clusterset.AnnotationClusterWeights: "west=1000,east=0,north=0"})}
	}, nil},
	{"a record has an invalid key in serviceLabels", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-1", func(r *v1alpha1.ExportRecord) { r.Spec.ServiceLabels = map[string]string{"their key": "x"} })
	}, []string{"their key"}},
	{"a record has an invalid value in serviceLabels", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-2", func(r *v1alpha1.ExportRecord) { r.Spec.ServiceLabels = map[string]string{"team": "their shop"} })
	}, []string{"their shop"}},
	{"a back-dated record hides an import from agents", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-3", func(r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt = longAgo
			r.Spec.ExportedLabels = map[string]string{v1alpha1.LabelServiceName: "x"}
		})
	}, nil},
	{"a back-dated record makes a Service headless", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-4", func(r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt, r.Spec.Import.Type = longAgo, v1beta1.Headless
		})
	}, nil},
	{"a back-dated record takes all clients", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-5", func(r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt = longAgo
			r.Spec.ExportedAnnotations = map[string]string{"isthmus.dev/cluster-weights": "crook=1000,east=0,north=0"}
		})
	}, nil},
	{"a back-dated record renames a port", "", func(w *testbed) []client.Object {
		return crookExports(w.scene, "bystander-6", func(r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt, r.Spec.Import.Ports[0].Name = longAgo, "web"
		})
	}, nil},
	{"a record dates itself before a new Service", "", func(w *testbed) []client.Object {
		w.addLatecomer()
		e := &v1beta1.ServiceExport{}
		w.noError(w.cluster("east").Get(w.t.Context(), types.NamespacedName{Namespace: shop, Name: "latecomer"}, e))
		return crookExports(w.scene, "latecomer", func(r *v1alpha1.ExportRecord) {
			r.Spec.ExportedAt, r.Spec.Import.Type = metav1.NewTime(e.CreationTimestamp.Add(-time.Second)), v1beta1.Headless
		})
	}, nil},
	{"a member names the API server's address as its endpoint", "", func(w *testbed) []client.Object {
		return []client.Object{w.scene.Record("bystander-7"), w.scene.Slice("bystander-7", "10.96.0.1")}
	}, []string{"10.96.0.1"}},
	{"a member names another member's pod as its endpoint", "", func(w *testbed) []client.Object {
		return []client.Object{w.scene.Record("bystander-7"), w.scene.Slice("bystander-7", "10.101.7.77")}
	}, []string{"10.101.7.77"}},
	{"a Service without a ClusterSetIP leads to addresses of other clusters' Services", "", func(w *testbed) []client.Object {
		r := w.scene.Record("declined")
		r.Spec.UseClusterSetIP = new(false)
		return []client.Object{r, w.scene.Slice("declined", "10.96.0.53")}
	}, []string{"10.96.0.53"}},
	{"a tenant's Service declines a ClusterSetIP where Service CIDRs overlap", "west", func(*testbed) []client.Object {
		return declinedService("declines")
	}, []string{string(mcs.ReasonServiceCIDRsOverlap)}},
	{"an aggregate declines a ClusterSetIP for the next Service", "", func(w *testbed) []client.Object {
		si := w.scene.Aggregate(newcomer(w.round + 1))
		si.Spec.IPs = nil
		delete(si.Annotations, v1alpha1.AnnotationAllocatedBy)
		si.Annotations[v1alpha1.AnnotationUseClusterSetIP] = "false"
		return []client.Object{si}
	}, []string{"no exporter asks for that"}},
	{"one Service has more ports than a service may have", "", func(w *testbed) []client.Object {
		return manyPorts(w.scene, 100, 1001)
	}, []string{"at most 1000"}},
	{"many Services of many ports fill the nodes", "", func(w *testbed) []client.Object {
		var all []client.Object
		for i := range 70 {
			all = append(all, manyPorts(w.scene, i, 1000)...)
		}
		return all
	}, []string{"QuotaExceeded: member crook has", "ports of at most 20000"}},
}

// notHeldYet are the attacks that still do harm, with their findings. One that no longer does must leave the list. No drawn
// object is one of them.
var notHeldYet = map[string]string{
	// A record counts from the time that it claims if the broker has it within minutes of that.
	"a record dates itself before a new Service": "T5",
}

// addLatecomer creates one more bystander, unless it exists.
func (w *testbed) addLatecomer() {
	w.t.Helper()
	if len(w.bystanders) > seniors+elders {
		return
	}
	w.addBystander("latecomer", false)
	w.serveBystanders()
	var err error
	w.counts, err = w.size(w.t.Context())
	w.noError(err)
}

// longAgo is before every member joined.
var longAgo = metav1.NewTime(time.Unix(1, 0).UTC())

func tenantImport(namespace, name, ip string, port int32) *v1beta1.ServiceImport {
	return &v1beta1.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1beta1.ServiceImportSpec{
			Type: v1beta1.ClusterSetIP, IPs: []string{ip}, Ports: []v1beta1.ServicePort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: port}},
		},
	}
}

// elderExport returns the export of one of the Services that the tenant exported first.
func elderExport(i int, labels, annotations map[string]string) *v1beta1.ServiceExport {
	e := serviceExport(elderName(i))
	e.Spec.ExportedLabels, e.Spec.ExportedAnnotations = labels, annotations
	return e
}

// declinedService returns what a tenant writes to export the address of a Service instead of a ClusterSetIP.
func declinedService(name string) []client.Object {
	meta := metav1.ObjectMeta{Namespace: mischief, Name: name}
	export := &v1beta1.ServiceExport{ObjectMeta: *meta.DeepCopy()}
	export.Annotations = map[string]string{v1alpha1.AnnotationUseClusterSetIP: "false"}
	return []client.Object{&corev1.Service{
		ObjectMeta: *meta.DeepCopy(), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}}},
	}, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: mischief, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.119.0.9"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}},
		Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
	}, export}
}

// crookExports returns what crook writes to export a Service with an endpoint of its own.
func crookExports(s hostile.Scene, name string, edit func(*v1alpha1.ExportRecord)) []client.Object {
	r := s.Record(name)
	if edit != nil {
		edit(r)
	}
	return []client.Object{r, s.Slice(name, fmt.Sprintf("10.%d.0.1", numbers[crook]))}
}

// manyPorts returns what crook writes to export Service i with a number of ports.
func manyPorts(s hostile.Scene, i, ports int) []client.Object {
	name, ip := fmt.Sprint("many-", i), fmt.Sprint("243.66.1.", i)
	aggregate := s.Aggregate(name, netip.MustParseAddr(ip))
	return append([]client.Object{aggregate}, crookExports(s, name, func(r *v1alpha1.ExportRecord) {
		r.Spec.IPs = []string{ip}
		r.Spec.Import.Ports = nil
		for n := range int32(ports) {
			r.Spec.Import.Ports = append(r.Spec.Import.Ports, v1beta1.ServicePort{Name: fmt.Sprint("p", n), Protocol: corev1.ProtocolTCP, Port: n + 1})
		}
	})...)
}
