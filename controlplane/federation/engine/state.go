package engine

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/internal/member"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// MemberState is the state of a member as this process sees it.
type MemberState struct {
	ID         clusterset.ClusterID
	Leader     string // CLUSTER/POD, "" while there is none
	Leading    bool   // this process leads the member
	Epoch      int64
	Reachable  bool
	Supervisor bool
	Problem    string         // why the member is not reachable, and the remedy
	Stuck      string         // which reconcilers cannot read the reachable member, and the remedy
	UID        string         // of the namespace kube-system
	Counts     map[string]int // objects that a reconciler counts, by its name
	Settings   member.Settings
	Unfenced   bool // this process leads it, and its API server does not reject writes of former leaders
	Dead       bool // neither its API server nor its endpoints answer
	Held       int  // withdrawals of the member that are held back
}

// States returns the states of the members, sorted by id.
func (e *Engine) States() []MemberState {
	members := e.all()
	held := e.allHolds(members)
	states := make([]MemberState, 0, len(members))
	for _, m := range members {
		is := m.State()
		s := MemberState{ID: m.ID(), Reachable: m.Reachable(), Supervisor: is.Supervisor, Problem: is.Problem, UID: is.UID, Settings: is.Settings, Unfenced: m.unfenced.Load(), Dead: e.liveness.Dead(m.ID()), Counts: map[string]int{}, Held: held[m.ID()]}
		s.Leader, s.Epoch = m.candidate.Seen()
		s.Leading = s.Leader == e.cfg.Identity
		s.Leader, _, _ = strings.Cut(s.Leader, "_")
		s.Stuck = stuck(e.cfg.Reconcilers, m.views)
		for i, r := range e.cfg.Reconcilers {
			s.Counts[r.Name()] = m.views[i].counted()
		}
		states = append(states, s)
	}
	slices.SortFunc(states, func(a, b MemberState) int { return cmp.Compare(a.ID, b.ID) })
	return states
}

// stuck returns which Reconcilers cannot follow a member because a right is missing, in a text that stays the same between
// two attempts; "" for none.
func stuck(reconcilers []reconcile.Reconciler, views []*view) string {
	var texts []string
	for i, r := range reconcilers {
		var kinds []string
		for _, gvk := range views[i].Forbidden() {
			kinds = append(kinds, fmt.Sprintf("%s of %s", gvk.Kind, gvk.GroupVersion()))
		}
		if len(kinds) > 0 {
			texts = append(texts, fmt.Sprintf("its API server does not let leaders get, list and watch %s, so %s do not follow changes of it", strings.Join(kinds, ", "), r.Name()))
		}
	}
	if len(texts) == 0 {
		return ""
	}
	return strings.Join(texts, "; ") + "; run isthmusctl federation create again, which gives the rights"
}
