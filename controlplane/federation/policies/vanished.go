package policies

import (
	"context"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// offered is a policy that a cluster asks to replicate.
type offered struct {
	cluster clusterset.ClusterID
	key     reconcile.Key
}

// Run decides about origins that vanished, until ctx ends.
func (p *policies) Run(ctx context.Context, again func(reconcile.Key)) error {
	p.again = again
	return p.guard.Run(ctx)
}

// note tells the guard which clusters ask to replicate a policy, and which say that they do no more: those that have
// the object still.
func (p *policies) note(key reconcile.Key, all []held) {
	for i := range all {
		switch h := &all[i]; {
		case h.object == nil:
		case federated(h.object):
			p.seen.Store(offered{h.member, key}, true)
			p.guard.Offered(h.member, key)
		default:
			p.guard.Withdrawn(h.member, key)
		}
	}
}

// keeps reports whether the origin of copied, which its cluster has no more, is taken for there all the same: it
// vanished just now, or together with many others. Where the object is there and asks no more, or its cluster left,
// there is no doubt.
func (p *policies) keeps(key reconcile.Key, copied *unstructured.Unstructured, all []held) bool {
	text, _ := copyOf(copied)
	from := clusterset.ClusterID(text)
	i := slices.IndexFunc(all, func(h held) bool { return h.member == from })
	if i < 0 || all[i].object != nil {
		return false
	}
	if _, before := p.seen.LoadOrStore(offered{from, key}, true); before {
		p.guard.Vanished(from, key)
	} else { // it vanished before this process began
		p.guard.Offered(from, key)
		p.guard.VanishedUnseen(from, key)
	}
	return p.guard.Keeps(from, key)
}

// Holds is part of reconcile.Guarded.
func (p *policies) Holds() []withdrawal.Hold { return p.guard.Holds() }

// Release is part of reconcile.Guarded.
func (p *policies) Release(of clusterset.ClusterID) { p.guard.Release(of) }
