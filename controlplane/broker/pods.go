package broker

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/nodes"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// podStatements returns what the member states in its Lease about its pod CIDRs: those of its Nodes that it has not registered. While
// they are unknown, the former statement stays. It follows Nodes alone, because tenants cannot write them: a tenant's EndpointSlice
// extends no member.
func podStatements(n *nodes.Nodes, self clusterset.Member) map[string]string {
	cidrs, known := n.PodCIDRs()
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
	if r.nodes == nil || err != nil {
		return c
	}
	cidrs, known := r.nodes.PodCIDRs()
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
	case r.podCIDRs <- struct{}{}:
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
