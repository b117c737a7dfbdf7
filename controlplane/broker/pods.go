package broker

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// podWatch follows the pod CIDRs of this cluster's nodes. Nodes that were added after the cluster joined may have some that it has
// not registered. It follows Nodes alone, because tenants cannot write them: a tenant's EndpointSlice extends no member.
//
// It does not use the manager's cache, whose controllers wait for all that it reads: a chart of an older version grants no right to
// read Nodes.
type podWatch struct {
	client client.WithWatch
	nodes  *objectcache.Informer[string, string] // the pod CIDRs of each Node, joined by commas
}

// newPodWatch returns a podWatch that calls changed when the result of cidrs may have changed; changed does not block.
func newPodWatch(c client.WithWatch, changed func()) (*podWatch, error) {
	nodes, err := objectcache.New(c.Scheme(), objectcache.Config[string, string]{
		Source: objectcache.Source{Object: &corev1.Node{}},
		Compact: func(obj client.Object) string {
			n, ok := obj.(*corev1.Node)
			if !ok {
				return ""
			}
			return strings.Join(n.Spec.PodCIDRs, ",")
		},
		After: func(was, is string, _ bool) {
			if was != is {
				changed()
			}
		},
		Settled: changed,
	})
	return &podWatch{c, nodes}, err
}

// +kubebuilder:rbac:groups="",resources=nodes,verbs=list;watch

// Start follows the Nodes until ctx ends. The manager calls it in the active replica. Without the right to read Nodes, cidrs stays
// unknown, and all else works.
func (w *podWatch) Start(ctx context.Context) error { return w.nodes.Run(ctx, w.client) }

// cidrs returns the pod CIDRs of all nodes, and false until they have been read.
func (w *podWatch) cidrs() (all []netip.Prefix, known bool) {
	if w.nodes.Err() != nil {
		return nil, false
	}
	for _, texts := range w.nodes.All() {
		all = append(all, clusterset.ParsePrefixes(texts)...)
	}
	return all, true
}

// statements returns what the member states in its Lease about its pod CIDRs: those that it has not registered. While they are
// unknown, the former statement stays.
func (w *podWatch) statements(self clusterset.Member) map[string]string {
	cidrs, known := w.cidrs()
	if !known {
		return nil
	}
	extends, outside := self.Beyond(cidrs)
	return map[string]string{v1alpha1.AnnotationPodCIDRs: clusterset.FormatPrefixes(slices.Concat(extends, outside))}
}

// podCondition reports whether the other members accept the pods of all nodes, given the registration. It is Unknown until the nodes
// have been read.
func (r *registration) podCondition(m *v1alpha1.Member) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionPodsRegistered, Status: metav1.ConditionUnknown}
	self, err := mcs.Member(m)
	if r.pods == nil || err != nil {
		return c
	}
	cidrs, known := r.pods.cidrs()
	if !known {
		return c
	}
	extends, outside := self.Beyond(cidrs)
	c.Status, c.Reason = metav1.ConditionTrue, v1alpha1.ReasonPodsInside
	c.Message = "the registered CIDRs contain the pod CIDRs of all nodes"
	if len(extends) > 0 {
		c.Reason = v1alpha1.ReasonPodsExtended
		c.Message = "the other members accept pod CIDRs of nodes inside of the registered supernets: " + some(extends)
	}
	if len(extends) > clusterset.MaxExtended {
		outside = append(outside, extends[clusterset.MaxExtended:]...)
	}
	if len(outside) > 0 {
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonPodsOutside
		c.Message = fmt.Sprintf("the other members ignore the pods of nodes with the pod CIDRs %s, which are not registered; "+
			"register them on the broker with isthmusctl member set %s --pod-cidr, or a CIDR for all nodes to come with --pod-supernet", some(outside), m.Name)
	}
	return c
}

// some lists a few prefixes and the number of the others.
func some(ps []netip.Prefix) string {
	const few = 5
	var texts []string
	for _, p := range ps[:min(few, len(ps))] {
		texts = append(texts, p.String())
	}
	if n := len(ps) - few; n > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", n))
	}
	return strings.Join(texts, ", ")
}

// podsChanged enqueues the Member after a change of the nodes' pod CIDRs. It never waits.
func (r *registration) podsChanged() {
	select {
	case r.nodes <- struct{}{}:
	default:
	}
}

// reportPods records an event if the condition changed since m.
func (r *registration) reportPods(m *v1alpha1.Member, is *metav1.Condition) {
	was := meta.FindStatusCondition(m.Status.Conditions, v1alpha1.ConditionPodsRegistered)
	if is == nil || was != nil && was.Reason == is.Reason && was.Message == is.Message {
		return
	}
	kind := corev1.EventTypeNormal
	if is.Status == metav1.ConditionFalse {
		kind = corev1.EventTypeWarning
	}
	r.events.Eventf(r.member(), nil, kind, is.Reason, "Register", "%s", is.Message)
}
