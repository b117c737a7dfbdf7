package policies

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
)

// Outcome is the state of one federated policy in one member, and the next action of its leader there.
type Outcome struct {
	Kind      string               `json:"kind"` // KIND.VERSION.GROUP
	Namespace string               `json:"namespace,omitempty"`
	Name      string               `json:"name"`
	Origin    clusterset.ClusterID `json:"origin,omitempty"` // empty if no cluster asks to replicate it any more
	Member    clusterset.ClusterID `json:"member"`
	Result
	// Action is leave, create, replace or remove.
	Action string `json:"action"`
	// Differences are the changes that the action makes.
	Differences []Difference `json:"differences,omitempty"`
	// Peers are the peers that are not federated Services (see Status).
	Peers []string `json:"peers,omitempty"`
}

// Difference is one field that would change. Have or Want is nil where the field does not exist.
type Difference struct {
	Path string `json:"path"`
	Have any    `json:"have,omitempty"`
	Want any    `json:"want,omitempty"`
}

// Proposal is an object that might be applied in a member, in the form that the member's API server would store.
type Proposal struct {
	Member clusterset.ClusterID
	Object *unstructured.Unstructured
}

// Preview returns the state of every federated policy in all members but its own, read now, and the next actions of leaders
// there. Proposals count as applied. It writes nothing. The result is sorted by policy and member.
func Preview(ctx context.Context, c Config, members []reconcile.Member, proposals []Proposal) ([]Outcome, error) {
	p := &Reconciler{config: c}
	keys := map[reconcile.Key]bool{}
	for _, kind := range c.Kinds {
		for _, m := range members {
			if !m.Synced() {
				continue
			}
			list, err := p.list(ctx, m, kind)
			if errors.Is(err, objectcache.ErrKindMissing) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("list policies of member %s: %w", m.ID(), err)
			}
			for i := range list.Items {
				o := &list.Items[i]
				if _, isCopy := copyOf(o); isCopy || federated(o) {
					keys[keyOf(kind, o.GetNamespace(), o.GetName())] = true
				}
			}
		}
		for _, proposal := range proposals {
			if o := proposal.Object; o.GroupVersionKind() == object(kind).GroupVersionKind() {
				keys[keyOf(kind, o.GetNamespace(), o.GetName())] = true
			}
		}
	}
	var all []Outcome
	for key := range keys {
		of, err := p.preview(ctx, key, members, proposals)
		if err != nil {
			return nil, err
		}
		all = append(all, of...)
	}
	slices.SortFunc(all, func(a, b Outcome) int {
		return slices.Compare([]string{a.Kind, a.Namespace, a.Name, string(a.Member)}, []string{b.Kind, b.Namespace, b.Name, string(b.Member)})
	})
	return all, nil
}

// preview returns the outcomes of one policy.
func (r *Reconciler) preview(ctx context.Context, key reconcile.Key, members []reconcile.Member, proposals []Proposal) ([]Outcome, error) {
	seen := make([]observed, len(members))
	for i, m := range members {
		var err error
		if seen[i], err = r.observe(ctx, key, m); err != nil {
			return nil, fmt.Errorf("read %s of member %s: %w", describe(key), m.ID(), err)
		}
		for _, proposal := range proposals {
			if o := proposal.Object; proposal.Member == m.ID() && keyOfObject(o) == key {
				r.place(&seen[i], o)
			}
		}
	}
	from := origin(seen)
	var peers []string
	if from != nil {
		at := slices.IndexFunc(members, func(m reconcile.Member) bool { return m.ID() == from.member })
		peers = localPeers(from.object, func(namespace, name string) bool {
			service := partial("Service")
			return members[at].Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, service) == nil && isFederatedService(service)
		})
	}
	var all []Outcome
	for i := range seen {
		h := &seen[i]
		o := Outcome{Kind: key.Kind, Namespace: key.Namespace, Name: key.Name, Member: h.member, Peers: peers}
		s := decide(h, seen)
		o.Action = string(s.verb)
		switch {
		case h.denial != nil:
			o.Origin, o.Result = h.member, Result{State: Denied, Message: h.denial.Error()}
		case from != nil && from.member == h.member:
			continue
		case from != nil:
			o.Origin, o.Result = from.member, result(h, from)
		case s.verb == remove:
			o.State = Pending
		default:
			continue // a user's object, or a copy whose origin is silent
		}
		if s.verb != leave {
			o.Differences = differences(h.object, s.want)
		}
		all = append(all, o)
	}
	return all, nil
}

// keyOfObject returns the key of an object of any kind.
func keyOfObject(o *unstructured.Unstructured) reconcile.Key {
	gvk := o.GroupVersionKind()
	return reconcile.Key{Kind: gvk.Kind + "." + gvk.Version + "." + gvk.Group, Namespace: o.GetNamespace(), Name: o.GetName()}
}

// differences returns the changes when want replaces have; either may be nil. Our marks are left out.
func differences(have, want *unstructured.Unstructured) []Difference {
	said := func(o *unstructured.Unstructured) any {
		if o == nil {
			return nil
		}
		text := body(o)
		own := map[string]any{}
		for field, values := range map[string]map[string]string{"labels": o.GetLabels(), "annotations": o.GetAnnotations()} {
			shown := map[string]any{}
			for k, v := range values {
				if travels(k) {
					shown[k] = v
				}
			}
			if len(shown) > 0 {
				own[field] = shown
			}
		}
		if len(own) > 0 {
			text["metadata"] = own
		}
		return text
	}
	return diff("", said(have), said(want))
}

// diff compares two JSON trees. A list is one field.
func diff(path string, have, want any) []Difference {
	h, isMap := have.(map[string]any)
	w, alsoMap := want.(map[string]any)
	if !(isMap && alsoMap) && (path != "" || have != nil && want != nil) {
		if reflect.DeepEqual(have, want) {
			return nil
		}
		return []Difference{{Path: path, Have: have, Want: want}}
	}
	fields := map[string]bool{}
	for _, m := range []map[string]any{h, w} {
		for field := range m {
			fields[field] = true
		}
	}
	var all []Difference
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		all = append(all, diff(strings.TrimPrefix(path+"."+field, "."), h[field], w[field])...)
	}
	return all
}

// Live returns a member that a client reads directly: each read is a request. silent states that the member does not
// respond.
func Live(id clusterset.ClusterID, c client.Reader, silent bool) reconcile.Member {
	return &live{Reader: c, id: id, silent: silent}
}

type live struct {
	client.Reader

	id     clusterset.ClusterID
	silent bool
}

func (l *live) ID() clusterset.ClusterID { return l.id }
func (l *live) Synced() bool             { return !l.silent }
func (l *live) Reachable() bool          { return !l.silent }
func (*live) Dead() bool                 { return false }
func (*live) Supervisor() bool           { return false }

func (l *live) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return missing(l.Reader.Get(ctx, key, o, opts...))
}

func (l *live) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	return missing(l.Reader.List(ctx, list, opts...))
}

// missing turns the error of a missing kind into that of a reconcile.Member.
func missing(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: %w", objectcache.ErrKindMissing, err)
	}
	return err
}
