package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// The reasons of the condition Ready.
const (
	reasonReady       = "MembersReachable"
	reasonNoMembers   = "NoMembers"
	reasonUnreachable = "MembersUnreachable"
	reasonDenied      = "MembersDenyReading"
	reasonProblem     = "NotDoingItsPart"
)

// The reason of the condition Holding, and of an event when it begins; and that of an event when it ends.
const (
	reasonHeld      = "MuchVanished"
	reasonHoldEnded = "HoldEnded"
)

// states returns how the members look, sorted by id.
func (c *crew) states() []MemberState {
	c.mu.Lock()
	sites := maps.Clone(c.sites)
	c.mu.Unlock()
	var states []MemberState
	held := c.everybodys(slices.Collect(maps.Values(sites)))
	for id, s := range sites { // which are counted without the lock
		is := s.State()
		m := MemberState{ID: id, Reachable: s.Reachable(), Supervisor: is.Supervisor, Problem: is.Problem, UID: is.UID, Counts: map[string]int{}, Held: held[id]}
		m.Leader, m.Epoch = s.candidate.Seen()
		m.Leading = m.Leader == c.cfg.identity
		m.Leader, _, _ = strings.Cut(m.Leader, "_")
		m.Stuck = stuck(c.parts, s.views)
		for i, p := range c.parts {
			v := s.views[i]
			m.Counts[p.Name()] = v.count.of(v.Memory, v.Count)
		}
		states = append(states, m)
	}
	slices.SortFunc(states, func(a, b MemberState) int { return cmp.Compare(a.ID, b.ID) })
	return states
}

// stuck says which Parts do not go on in a member because a right is missing there, in words that do not change from one
// try to the next; "" for none.
func stuck(parts []reconcile.Part, views []*view) string {
	var texts []string
	for i, p := range parts {
		var kinds []string
		for _, gvk := range views[i].Denied() {
			kinds = append(kinds, fmt.Sprintf("%s of %s", gvk.Kind, gvk.GroupVersion()))
		}
		if len(kinds) > 0 {
			texts = append(texts, fmt.Sprintf("its API server does not let leaders get, list and watch %s, so %s that need that do not follow what changes there", strings.Join(kinds, ", "), p.Name()))
		}
	}
	if len(texts) == 0 {
		return ""
	}
	return strings.Join(texts, "; ") + "; run isthmusctl federation create again, which gives the rights"
}

// writeStatus writes what this process sees into the status of the cluster's Federation, if that says something else.
func (f *Federation) writeStatus(ctx context.Context, tell events.EventRecorder) error {
	have := &federationv1alpha1.Federation{}
	err := f.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, have)
	if errors.Is(err, reconcile.ErrUnread) || errors.Is(err, reconcile.ErrKindMissing) {
		return nil
	}
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	want := have.DeepCopy()
	f.describe(&want.Status, have)
	if equality.Semantic.DeepEqual(want.Status, have.Status) {
		return nil
	}
	if err := f.client.Status().Update(ctx, want); err != nil {
		return err
	}
	f.tellHolds(want, have.Status.Members, tell)
	return nil
}

// tellHolds tells of holds that begin and end. Every supervisor does, on its own Federation.
func (f *Federation) tellHolds(federation *federationv1alpha1.Federation, before []federationv1alpha1.MemberStatus, tell events.EventRecorder) {
	was := map[string]int64{}
	for _, m := range before {
		was[m.ClusterID] = m.Held
	}
	for _, m := range federation.Status.Members {
		switch {
		case m.Held > 0 && was[m.ClusterID] == 0:
			tell.Eventf(federation, nil, corev1.EventTypeWarning, reasonHeld, reasonHeld, "%s", heldText(m))
		case m.Held == 0 && was[m.ClusterID] > 0:
			tell.Eventf(federation, nil, corev1.EventTypeNormal, reasonHoldEnded, reasonHoldEnded,
				"nothing is held of member %s any more: it is back, was taken back openly, or is believed gone", m.ClusterID)
		}
	}
}

func heldText(m federationv1alpha1.MemberStatus) string {
	return fmt.Sprintf("of member %s %d federated Services and policies vanished at once and without a word, and are kept for an hour; "+
		"if they are meant to be gone run isthmusctl federation release %[1]s", m.ClusterID, m.Held)
}

// holding is the condition that something is held, or nil.
func holding(members []federationv1alpha1.MemberStatus) *metav1.Condition {
	var texts []string
	for _, m := range members {
		if m.Held > 0 {
			texts = append(texts, heldText(m))
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return &metav1.Condition{Type: federationv1alpha1.ConditionHolding, Status: metav1.ConditionTrue, Reason: reasonHeld, Message: strings.Join(texts, "; ")}
}

// describe makes status say how things are.
func (f *Federation) describe(status *federationv1alpha1.FederationStatus, of *federationv1alpha1.Federation) {
	state := f.State()
	status.ObservedGeneration = of.Generation
	before := status.Members
	status.Members = nil
	var away, denying []string
	for _, m := range state.Members {
		is := federationv1alpha1.MemberStatus{
			ClusterID: string(m.ID), ClusterUID: m.UID, Leader: m.Leader, Epoch: m.Epoch, Reachable: m.Reachable, Supervisor: m.Supervisor,
			Message: cmp.Or(m.Problem, m.Stuck), Services: int64(m.Counts["services"]), Policies: int64(m.Counts["policies"]), Held: int64(m.Held),
		}
		i := slices.IndexFunc(before, func(b federationv1alpha1.MemberStatus) bool { return b.ClusterID == is.ClusterID })
		if i >= 0 && is.ClusterUID == "" {
			is.ClusterUID = before[i].ClusterUID // not seen yet by this process
		}
		switch {
		case !m.Reachable:
			away = append(away, string(m.ID))
		case m.Stuck != "":
			denying = append(denying, string(m.ID))
		}
		status.Members = append(status.Members, is)
	}
	ready := metav1.Condition{Type: federationv1alpha1.ConditionReady, Status: metav1.ConditionTrue, ObservedGeneration: of.Generation}
	switch {
	case state.Problem != "":
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, reasonProblem, state.Problem
	case len(state.Members) == 0:
		ready.Reason, ready.Message = reasonNoMembers, "this cluster leads no member"
	case len(away) > 0:
		ready.Status, ready.Reason = metav1.ConditionFalse, reasonUnreachable
		ready.Message = fmt.Sprintf("not reachable: %s; see the messages of status.members", strings.Join(away, ", "))
	case len(denying) > 0:
		ready.Status, ready.Reason = metav1.ConditionFalse, reasonDenied
		ready.Message = fmt.Sprintf("rights are missing in: %s; see the messages of status.members", strings.Join(denying, ", "))
	default:
		ready.Reason, ready.Message = reasonReady, "every member answers"
	}
	meta.SetStatusCondition(&status.Conditions, ready)
	if c := holding(status.Members); c != nil {
		c.ObservedGeneration = of.Generation
		meta.SetStatusCondition(&status.Conditions, *c)
	} else {
		meta.RemoveStatusCondition(&status.Conditions, federationv1alpha1.ConditionHolding)
	}
}
