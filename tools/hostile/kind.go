package hostile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	gateway "github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
)

// Actor is a party that writes objects with credentials of its own.
type Actor string

// The actors.
const (
	// Tenant writes objects of its namespace in a member cluster.
	Tenant Actor = "tenant"
	// Member writes objects in the broker's namespace, as the controller of a member does.
	Member Actor = "member"
	// Child writes any object of its own cluster, as the administrator of a federation's child, or of gateways, does.
	Child Actor = "child"
)

// Kind draws objects of one kind that an actor may create, together with the objects that they need to have an effect:
// an export needs its Service.
type Kind struct {
	Name  string
	Actor Actor
	Draw  func(*Source) []client.Object
}

// Kinds returns the kinds of a ClusterSet over a broker. A federation without one has [FederationKinds], and gateways have
// [GatewayKinds].
func Kinds() []Kind { return append(tenantKinds(), memberKinds()...) }

// Place is a namespace of a member cluster in which a tenant may write.
type Place struct{ Cluster, Namespace string }

// Scene is the knowledge of an attacker: names and addresses that exist.
type Scene struct {
	// Tenants are the places of hostile tenants, or of a hostile child.
	Tenants []Place
	// System is the namespace of global Services of a federation.
	System string
	// Member is the hostile member, and Broker the broker's namespace.
	Member, Broker string
	// Others are the other members.
	Others []string
	// Namespace is the namespace of the bystanders, and Services are their names.
	Namespace string
	Services  []string
	// Next is the name of a Service that another member exports next. Its first exporter decides about it, so only objects
	// without an export use the name.
	Next string
	// Exported are the names of Services that hostile tenants exported first.
	Exported []string
	// Pods are the addresses of each member's endpoints. Block has the ClusterSetIPs that the hostile member may allocate, or
	// the range of the federation.
	Pods  map[string][]netip.Prefix
	Block netip.Prefix
	// Foreign are addresses of other owners: API servers, Services, pods and ClusterSetIPs of bystanders.
	Foreign []netip.Addr
	// Now is the time that drawn times refer to.
	Now time.Time
	// MaxPorts is the largest number of ports of a Service; 0 means 33000, more than half of the ports that exist.
	MaxPorts int
}

// Object is one drawn object, as it is sent to an API server.
type Object struct {
	*unstructured.Unstructured

	Actor Actor
	// Cluster is the cluster of a tenant's or a child's object; "" is the broker.
	Cluster string
	// Origin names the draw, such as "7/12" for number 12 of seed 7.
	Origin string
}

// String names the object, its author and its origin.
func (o Object) String() string {
	where := "on the broker"
	if o.Cluster != "" {
		where = "in " + o.Cluster
	}
	return fmt.Sprintf("%s of a %s %s: %s/%s (%s)", o.GetKind(), o.Actor, where, o.GetNamespace(), o.GetName(), o.Origin)
}

// Generator draws objects. Each number of a seed is drawn independently of the others.
type Generator struct {
	Kinds []Kind
	Scene Scene
	Seed  uint64
}

// Draw returns the objects of a number.
func (g Generator) Draw(number int) ([]Object, error) {
	s := &Source{Rand: rand.New(rand.NewPCG(g.Seed, uint64(number))), Scene: g.Scene, number: number}
	s.place = Pick(s, g.Scene.Tenants...)
	k := Pick(s, g.Kinds...)
	return s.objects(k.Actor, fmt.Sprintf("%d/%d", g.Seed, number), k.Draw(s)...)
}

// Objects returns typed objects as a tenant or child of cluster, or a member if cluster is empty, would send them. origin names
// them.
func Objects(cluster, origin string, typed ...client.Object) ([]Object, error) {
	s := &Source{place: Place{Cluster: cluster}}
	if cluster == "" {
		return s.objects(Member, origin, typed...)
	}
	return s.objects(Tenant, origin, typed...)
}

func (s *Source) objects(actor Actor, origin string, typed ...client.Object) ([]Object, error) {
	cluster := s.place.Cluster
	if actor == Member {
		cluster = ""
	}
	var objects []Object
	for _, obj := range typed {
		gvk, err := apiutil.GVKForObject(obj, scheme)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", origin, err)
		}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", origin, err)
		}
		u := &unstructured.Unstructured{Object: fields}
		u.SetGroupVersionKind(gvk)
		unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
		unstructured.RemoveNestedField(u.Object, "status")
		objects = append(objects, Object{Unstructured: u, Actor: actor, Cluster: cluster, Origin: origin})
	}
	return objects, nil
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme, gateway.AddToScheme, v1beta1.Install} {
		if err := add(s); err != nil {
			panic(err) // the kinds are constant
		}
	}
	return s
}()

// kindOf returns a Kind whose objects begin as base draws them and pass one to four of twists. base returns the object to
// twist, and those that it needs.
func kindOf[T client.Object](name string, actor Actor, base func(*Source) (T, []client.Object), twists ...func(*Source, T)) Kind {
	return Kind{Name: name, Actor: actor, Draw: func(s *Source) []client.Object {
		obj, needs := base(s)
		for range 1 + s.IntN(4) {
			Pick(s, twists...)(s, obj)
		}
		return append(needs, obj)
	}}
}
