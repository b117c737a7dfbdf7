package controller

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/gateway/desired"
	"github.com/isthmus-net/isthmus/gateway/openstack"
	"github.com/isthmus-net/isthmus/gateway/portmap"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// fieldOwner is the field manager of all writes.
const fieldOwner = "isthmus-gateway"

// invalid is an error that only the user of a Service can fix.
type invalid struct{ error }

func (i invalid) Unwrap() error { return i.error }

// verdict is what the gateways report of a Service.
type verdict struct{ reason, message string }

// warned are the reasons of verdicts that become events.
var warned = []string{service.ReasonRefused, service.ReasonNoSuchPort, service.ReasonForeignSlices, service.ReasonInvalidEndpoint}

// messageLimit is the maximum length of messages in conditions and events. The API server admits 1,024 characters in an event.
const messageLimit = 1000

// shorten cuts a long message.
func shorten(text string) string {
	const more = " …"
	if len(text) <= messageLimit {
		return text
	}
	return strings.ToValidUTF8(text[:messageLimit-len(more)], "") + more
}

// event records an event of a Service.
func (w *worker) event(s *corev1.Service, kind, reason, text string) {
	w.events.Eventf(s, nil, kind, reason, "Balance", "%s", shorten(text))
	w.log.Info(text, "namespace", s.Namespace, "service", s.Name, "reason", reason)
}

// reportRefused tells the user why a Service does not get what it asks for. It keeps what it has. The error is nil if
// retrying cannot help.
func (w *worker) reportRefused(ctx context.Context, s *corev1.Service, err error) error {
	c := metav1.Condition{Type: service.ConditionMapped, Status: metav1.ConditionFalse, Reason: service.ReasonCloud, Message: shorten(err.Error())}
	again := err
	var user invalid
	switch {
	case errors.Is(err, errWaiting):
		if !w.waitsLong(s) {
			return err
		}
		c.Reason, c.Message = service.ReasonPending, w.pendingMessage(s)
	case errors.Is(err, errWithdrawing): // confirmWithdrawals wakes it
		c.Reason, again = service.ReasonWithdrawing, nil
	case errors.As(err, &user):
		c.Reason, again = service.ReasonInvalid, nil
	case errors.Is(err, openstack.ErrQuota), errors.Is(err, errExhausted), errors.Is(err, errNamespaceQuota):
		c.Reason = service.ReasonQuotaExceeded
	case w.services[s.UID] != nil, apierrors.IsConflict(err), ctx.Err() != nil:
		return err // it keeps what it has, and a retry may succeed
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if c.Reason == service.ReasonInvalid || c.Reason == service.ReasonQuotaExceeded {
		w.waitsNoMore(nameOf(s)) // it has its answer
	}
	w.unmapped[nameOf(s)] = c.Reason
	was := meta.FindStatusCondition(s.Status.Conditions, c.Type)
	if c.Reason == service.ReasonPending && was != nil && was.Reason == service.ReasonCloud {
		return again // which says why it waits
	}
	news := was == nil || was.Reason != c.Reason || was.Message != c.Message
	if err := w.patchStatus(ctx, s, func(s *corev1.Service) { meta.SetStatusCondition(&s.Status.Conditions, c) }); err != nil {
		return errors.Join(again, err)
	}
	if news {
		w.event(s, corev1.EventTypeWarning, c.Reason, c.Message)
	}
	return again
}

// waitsLong reports whether a Service without an address has waited for the cloud long enough to say so.
func (w *worker) waitsLong(s *corev1.Service) bool {
	if w.services[s.UID] != nil {
		return false // it keeps what it has
	}
	since, ok := w.waitingSince[nameOf(s)]
	if !ok {
		since = w.now()
		w.waitingSince[nameOf(s)] = since
		servicesWaiting.Set(float64(len(w.waitingSince)))
	}
	return w.now().Sub(since) >= waitingNotice
}

// waitsNoMore notes that a Service has an address, needs none, or is refused.
func (w *worker) waitsNoMore(name types.NamespacedName) {
	delete(w.waitingSince, name)
	servicesWaiting.Set(float64(len(w.waitingSince)))
}

// pendingMessage says what a Service waits for.
func (w *worker) pendingMessage(s *corev1.Service) string {
	want, _ := w.read(s) // it is valid
	return fmt.Sprintf("waits for OpenStack, which has not answered yet: it allocates the addresses of pool %s", want.Pool)
}

// reportMapped reports the addresses of a Service, and the verdict of the gateways.
func (w *worker) reportMapped(ctx context.Context, s *corev1.Service, addresses []netip.Addr) error {
	name := nameOf(s)
	delete(w.unmapped, name)
	v, known := w.verdicts[name]
	said := conditionMessage(s, service.ConditionApplied)
	m := w.services[s.UID]
	has := "addresses of pool " + m.port.Pool
	pool := w.settings.pool(m.port.Pool)
	if pool != nil && pool.FailoverIP != nil {
		has = "floating IP of pool " + pool.Name + "; its connections break when it moves to another gateway"
	}
	if pool != nil && m.want.Local && pool.Return != desired.Routed {
		has += fmt.Sprintf("; externalTrafficPolicy is Local, but backends do not see client addresses: the pool's return is %s, and only %s keeps them", pool.Return, desired.Routed)
	}
	if len(m.want.Unserved) > 0 {
		has += fmt.Sprintf("; not served: %s; gateways balance TCP and UDP", list(m.want.Unserved))
	}
	news := len(m.want.Unserved) > 0 && !strings.Contains(conditionMessage(s, service.ConditionMapped), "; not served: "+list(m.want.Unserved)+";")
	edit := w.pendingEdit(s)
	if edit != "" {
		has += "; " + edit
	}
	edited := edit != "" && !strings.Contains(conditionMessage(s, service.ConditionMapped), edit)
	err := w.patchStatus(ctx, s, func(s *corev1.Service) {
		s.Status.LoadBalancer.Ingress = ingress(addresses, m.want)
		if pool != nil {
			meta.SetStatusCondition(&s.Status.Conditions, writeRecord(w.recordOf(s, m.port, pool)))
		}
		meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{
			Type: service.ConditionMapped, Status: metav1.ConditionTrue, Reason: service.ReasonMapped, Message: has,
		})
		if !known {
			return
		}
		status := metav1.ConditionFalse
		if v.reason == service.ReasonApplied {
			status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: service.ConditionApplied, Status: status, Reason: v.reason, Message: v.message})
	})
	if err == nil && known && slices.Contains(warned, v.reason) && said != v.message {
		w.event(s, corev1.EventTypeWarning, v.reason, v.message)
	}
	if err == nil && edited {
		w.event(s, corev1.EventTypeWarning, "SettingsEdited", edit)
	}
	if err == nil && news {
		w.event(s, corev1.EventTypeWarning, "PortsNotServed", "spec.ports: gateways balance TCP and UDP; not served: "+list(m.want.Unserved))
	}
	return err
}

// conditionMessage returns the message of a Service's condition, "" without one.
func conditionMessage(s *corev1.Service, kind string) string {
	if c := meta.FindStatusCondition(s.Status.Conditions, kind); c != nil {
		return c.Message
	}
	return ""
}

// ingress returns the status entries for addresses and their L4 ports.
//
// kube-proxy intercepts connections of pods to an address of mode VIP, and sends them to the Service's own endpoints. That
// saves the way over a gateway and applies loadBalancerSourceRanges, so it is right for a Service with endpoints. A
// Service before a ServiceImport has none: kube-proxy would refuse every connection of a pod. With mode Proxy it leaves
// the address alone, and the pod's packets reach a gateway, which knows the endpoints of all clusters.
func ingress(addresses []netip.Addr, want service.Want) (all []corev1.LoadBalancerIngress) {
	mode := corev1.LoadBalancerIPModeVIP
	if want.Import != "" {
		mode = corev1.LoadBalancerIPModeProxy
	}
	for _, a := range addresses {
		i := corev1.LoadBalancerIngress{IP: a.String(), IPMode: &mode}
		for _, l := range want.L4 {
			i.Ports = append(i.Ports, corev1.PortStatus{Port: int32(l.Port), Protocol: corev1.Protocol(l.Protocol)})
		}
		for _, l := range want.Unserved {
			i.Ports = append(i.Ports, corev1.PortStatus{Port: int32(l.Port), Protocol: corev1.Protocol(l.Protocol), Error: new(service.ErrorUnservedProtocol)})
		}
		all = append(all, i)
	}
	return all
}

// reachablePorts returns the L4 ports that are also in a Service's status; all if the status has none.
func reachablePorts(s *corev1.Service, l4 []portmap.L4) []portmap.L4 {
	if len(s.Status.LoadBalancer.Ingress) == 0 || len(s.Status.LoadBalancer.Ingress[0].Ports) == 0 {
		return l4
	}
	had := s.Status.LoadBalancer.Ingress[0].Ports
	return slices.DeleteFunc(slices.Clone(l4), func(l portmap.L4) bool {
		return !slices.ContainsFunc(had, func(p corev1.PortStatus) bool { return p.Port == int32(l.Port) && string(p.Protocol) == l.Protocol })
	})
}

// clearStatus removes what the controller wrote into a Service's status.
func (w *worker) clearStatus(ctx context.Context, s *corev1.Service) error {
	delete(w.verdicts, nameOf(s))
	delete(w.unmapped, nameOf(s))
	err := w.patchStatus(ctx, s, func(s *corev1.Service) {
		s.Status.LoadBalancer.Ingress = nil
		for _, kind := range []string{service.ConditionMapped, service.ConditionApplied, service.ConditionAllocated} {
			meta.RemoveStatusCondition(&s.Status.Conditions, kind)
		}
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// patchStatus changes the status of a Service. It writes nothing when nothing changes.
func (w *worker) patchStatus(ctx context.Context, s *corev1.Service, change func(*corev1.Service)) error {
	before := s.DeepCopy()
	change(s)
	if sameStatus(&before.Status, &s.Status) {
		return nil
	}
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := w.client.Status().Patch(ctx, s, patch, client.FieldOwner(fieldOwner)); err != nil {
		return fmt.Errorf("write status of service %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}

func sameStatus(a, b *corev1.ServiceStatus) bool {
	return slices.Equal(a.Conditions, b.Conditions) && slices.EqualFunc(a.LoadBalancer.Ingress, b.LoadBalancer.Ingress, func(a, b corev1.LoadBalancerIngress) bool {
		return a.IP == b.IP && a.Hostname == b.Hostname && deref(a.IPMode) == deref(b.IPMode) && slices.EqualFunc(a.Ports, b.Ports, func(a, b corev1.PortStatus) bool {
			return a.Port == b.Port && a.Protocol == b.Protocol && deref(a.Error) == deref(b.Error)
		})
	})
}
