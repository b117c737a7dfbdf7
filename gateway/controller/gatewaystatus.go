package controller

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/gateway/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/controller/internal/agents"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// driftLimit is the maximum number of drift entries in a status.
const driftLimit = 32

// reportGateways updates the status of each GatewayNode.
func (w *worker) reportGateways(ctx context.Context, plans []plan, reports map[string]agents.Report) error {
	var errs []error
	for _, p := range plans {
		r := reports[p.node.Name]
		errs = append(errs, w.patchNode(ctx, p.node, func(s *v1alpha1.GatewayNodeStatus) {
			describe(s, p, r)
			describeCertificate(s, r.Certificate, w.now())
			s.FloatingIPs = w.failoverIPsAt(p.node)
			s.Addresses = sortedTexts(w.given[p.node.Name])
			if w.usesPairs(p.node) {
				is := w.pairsOf(p.node)
				describePairs(s, is.err, is.set)
			} else {
				meta.RemoveStatusCondition(&s.Conditions, v1alpha1.ConditionAddressPairs)
			}
		}))
	}
	return errors.Join(errs...)
}

// describe fills the status of a gateway. The last report stays while the gateway does not answer.
func describe(s *v1alpha1.GatewayNodeStatus, p plan, r agents.Report) {
	if r.Asked && r.Status.Version+r.Status.Hash != "" {
		s.AppliedGeneration, s.Hash, s.Version = int64(r.Status.Generation), r.Status.Hash, r.Status.Version
		s.Drift, s.Announced = nil, nil
		for _, f := range r.Status.Drift[:min(len(r.Status.Drift), driftLimit)] {
			s.Drift = append(s.Drift, f.Component+": "+desired.Faults{f}.Error())
		}
		for _, a := range r.Status.Announced {
			s.Announced = append(s.Announced, a.String())
		}
	}
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: p.node.Generation})
	}
	switch {
	case r.Err != nil:
		set(v1alpha1.ConditionReachable, metav1.ConditionFalse, v1alpha1.ReasonNoAnswer, r.Err.Error())
	case r.Asked:
		set(v1alpha1.ConditionReachable, metav1.ConditionTrue, v1alpha1.ReasonAnswers, "the agent answers")
	}
	switch {
	case p.err != nil:
		set(v1alpha1.ConditionApplied, metav1.ConditionFalse, p.reason, shorten(p.err.Error()))
	case r.Refused != nil:
		set(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonRefused, shorten(r.Refused.Error()))
	case r.Applied && len(p.faults)+len(r.Status.Refused) > 0:
		refused := slices.Concat(p.faults, r.Status.Refused).ByService()
		texts := make([]string, len(refused))
		for i, f := range refused {
			texts[i] = f.Services[0] + ": " + f.Message
		}
		text := fmt.Sprintf("the gateway has applied its state without refused Services (%d), which stay as they were or are left out: %s", len(refused), strings.Join(texts, "; "))
		set(v1alpha1.ConditionApplied, metav1.ConditionTrue, v1alpha1.ReasonServicesRefused, shorten(text))
	case r.Applied:
		set(v1alpha1.ConditionApplied, metav1.ConditionTrue, v1alpha1.ReasonApplied, "the gateway has applied its state")
	default:
		set(v1alpha1.ConditionApplied, metav1.ConditionFalse, v1alpha1.ReasonPending, "the state was not sent yet; it is sent when the agent answers")
	}
}

// describePairs sets the AddressPairs condition. It stays as it was until Neutron has answered.
func describePairs(s *v1alpha1.GatewayNodeStatus, err error, set bool) {
	switch {
	case err != nil:
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: v1alpha1.ConditionAddressPairs, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotAllowed, Message: err.Error()})
	case set:
		meta.SetStatusCondition(&s.Conditions, metav1.Condition{Type: v1alpha1.ConditionAddressPairs, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAllowed, Message: "Neutron lets all VIPs pass"})
	}
}

// describeCertificate sets the expiry of the agent's certificate and the condition CertificateUpToDate. Both stay as they were
// until the agent has answered.
func describeCertificate(s *v1alpha1.GatewayNodeStatus, v certs.Validity, now time.Time) {
	if v == (certs.Validity{}) {
		return
	}
	s.CertificateNotAfter = &metav1.Time{Time: v.NotAfter}
	c := metav1.Condition{Type: v1alpha1.ConditionCertificateUpToDate, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonUpToDate, Message: "more than a quarter of the lifetime of its certificate is left"}
	if v.RenewalOverdue(now) {
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonRenewalOverdue
		c.Message = "its certificate expires at " + v.NotAfter.Format(time.RFC3339) + "; renew it: isthmusctl gateway certs"
	}
	meta.SetStatusCondition(&s.Conditions, c)
}

func sameNode(a, b *v1alpha1.GatewayNodeStatus) bool {
	return a.AppliedGeneration == b.AppliedGeneration && a.Hash == b.Hash && a.Version == b.Version && slices.Equal(a.Drift, b.Drift) &&
		slices.Equal(a.Announced, b.Announced) && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.AddressPairs, b.AddressPairs) && slices.Equal(a.AddressPairsMissing, b.AddressPairsMissing) && a.AddressPairsPort == b.AddressPairsPort &&
		slices.Equal(a.FloatingIPs, b.FloatingIPs) && a.CertificateNotAfter.Equal(b.CertificateNotAfter) && reflect.DeepEqual(a.Conditions, b.Conditions)
}
