package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/part"
)

// The reasons of the condition Ready.
const (
	reasonReady       = "MembersReachable"
	reasonNoMembers   = "NoMembers"
	reasonUnreachable = "MembersUnreachable"
	reasonProblem     = "NotDoingItsPart"
)

// states returns how the members look, sorted by id.
func (c *crew) states() []MemberState {
	c.mu.Lock()
	sites := maps.Clone(c.sites)
	c.mu.Unlock()
	var states []MemberState
	for id, s := range sites { // which are counted without the lock
		is := s.State()
		m := MemberState{ID: id, Reachable: s.Reachable(), Supervisor: is.Supervisor, Problem: is.Problem, UID: is.UID, Counts: map[string]int{}}
		m.Leader, m.Epoch = s.candidate.Seen()
		m.Leading = m.Leader == c.cfg.identity
		m.Leader, _, _ = strings.Cut(m.Leader, "_")
		for i, p := range c.parts {
			v := s.views[i]
			m.Counts[p.Name()] = v.count.of(v.Memory, v.Count)
			if g, ok := p.(part.Guarded); ok {
				for _, hold := range g.Holds() {
					if hold.Source == id {
						m.Held += hold.Count
					}
				}
			}
		}
		states = append(states, m)
	}
	slices.SortFunc(states, func(a, b MemberState) int { return cmp.Compare(a.ID, b.ID) })
	return states
}

// writeStatus writes what this process sees into the status of the cluster's Federation, if that says something else.
func (f *Federation) writeStatus(ctx context.Context) error {
	have := &federationv1alpha1.Federation{}
	err := f.local.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, have)
	if errors.Is(err, part.ErrUnread) || errors.Is(err, part.ErrKindMissing) {
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
	return f.client.Status().Update(ctx, want)
}

// describe makes status say how things are.
func (f *Federation) describe(status *federationv1alpha1.FederationStatus, of *federationv1alpha1.Federation) {
	state := f.State()
	status.ObservedGeneration = of.Generation
	before := status.Members
	status.Members = nil
	var away []string
	for _, m := range state.Members {
		is := federationv1alpha1.MemberStatus{
			ClusterID: string(m.ID), ClusterUID: m.UID, Leader: m.Leader, Epoch: m.Epoch, Reachable: m.Reachable, Supervisor: m.Supervisor,
			Message: m.Problem, Services: int64(m.Counts["services"]), Policies: int64(m.Counts["policies"]), Held: int64(m.Held),
		}
		i := slices.IndexFunc(before, func(b federationv1alpha1.MemberStatus) bool { return b.ClusterID == is.ClusterID })
		if i >= 0 && is.ClusterUID == "" {
			is.ClusterUID = before[i].ClusterUID // not seen yet by this process
		}
		if !m.Reachable {
			away = append(away, string(m.ID))
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
	default:
		ready.Reason, ready.Message = reasonReady, "every member answers"
	}
	meta.SetStatusCondition(&status.Conditions, ready)
}
