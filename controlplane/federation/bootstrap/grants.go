package bootstrap

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// place is a namespace of a member, "" for its objects without one.
type place struct {
	member    clusterset.ClusterID
	namespace string
}

// present are the names of what takes part in the federation, or asks to.
type present struct {
	global, own, policies map[string]bool
}

// grants returns the grants of the supervisors, nil if they have none.
func (s *survey) grants() []federationv1alpha1.Grant {
	for _, found := range s.clusters {
		if found.Supervisor && found.federation != nil && found.federation.Spec.Grants != nil {
			return found.federation.Spec.Grants
		}
	}
	return nil
}

// propose returns the grants under which everything that takes part in the federation now, or would, still does, and nothing else. They
// are never nil.
func (s *survey) propose(ctx context.Context) ([]federationv1alpha1.Grant, error) {
	all := map[place]*present{}
	for _, found := range s.clusters {
		if err := s.survey(ctx, found, all); err != nil {
			return nil, found.wrap(err)
		}
	}
	return grantsFor(all), nil
}

// survey adds what a cluster has.
func (s *survey) survey(ctx context.Context, found *surveyed, all map[place]*present) error {
	at := func(namespace string) *present {
		p := place{found.ID, namespace}
		if all[p] == nil {
			all[p] = &present{global: map[string]bool{}, own: map[string]bool{}, policies: map[string]bool{}}
		}
		return all[p]
	}
	err := s.eachJoining(ctx, found, func(svc *corev1.Service, name clusterset.ServiceName) {
		if name.Namespace == s.systemNamespace() {
			at(svc.Namespace).global[name.Name] = true
		} else {
			at(svc.Namespace).own[name.Name] = true
		}
	})
	if err != nil {
		return err
	}
	config := policies.Config{Kinds: s.kinds()}
	for _, kind := range config.Kinds {
		objects := &unstructured.UnstructuredList{}
		objects.SetGroupVersionKind(schema.GroupVersionKind{Group: kind.Group, Version: kind.Version, Kind: kind.Kind + "List"})
		if err := found.Client.List(ctx, objects); admin.IsAbsent(err) {
			continue
		} else if err != nil {
			return fmt.Errorf("list objects of kind %s: %w", kind.Kind, err)
		}
		for i := range objects.Items {
			if o := &objects.Items[i]; config.Travels(o) && clusterset.IsShared(o.GetNamespace()) {
				at(o.GetNamespace()).policies[o.GetName()] = true
			}
		}
	}
	return nil
}

// eachJoining calls do for each Service of a cluster that asks to join a federated one, with the name of that.
func (s *survey) eachJoining(ctx context.Context, found *surveyed, do func(svc *corev1.Service, name clusterset.ServiceName)) error {
	list := &corev1.ServiceList{}
	if err := found.Client.List(ctx, list); err != nil {
		return fmt.Errorf("list Services: %w", err)
	}
	for i := range list.Items {
		if name, ok := services.Joins(&list.Items[i], s.systemNamespace()); ok {
			do(&list.Items[i], name)
		}
	}
	return nil
}

// grantsFor returns one grant for each namespace and what it has. Members that have the same share a grant.
func grantsFor(all map[place]*present) []federationv1alpha1.Grant {
	patterns := func(names map[string]bool) []federationv1alpha1.Pattern {
		var sorted []federationv1alpha1.Pattern
		for _, name := range slices.Sorted(maps.Keys(names)) {
			sorted = append(sorted, federationv1alpha1.Pattern(name))
		}
		return sorted
	}
	byContent := map[string]*federationv1alpha1.Grant{}
	places := slices.SortedFunc(maps.Keys(all), func(a, b place) int {
		return cmp.Or(strings.Compare(a.namespace, b.namespace), strings.Compare(string(a.member), string(b.member)))
	})
	var order []string
	for _, p := range places {
		g := &federationv1alpha1.Grant{GlobalServices: patterns(all[p].global), Services: patterns(all[p].own)}
		if p.namespace == "" {
			g.ClusterPolicies = patterns(all[p].policies)
		} else {
			g.Namespaces, g.Policies = []federationv1alpha1.Pattern{federationv1alpha1.Pattern(p.namespace)}, patterns(all[p].policies)
		}
		content := fmt.Sprint(g)
		if byContent[content] == nil {
			byContent[content] = g
			order = append(order, content)
		}
		byContent[content].Members = append(byContent[content].Members, string(p.member))
	}
	grants := make([]federationv1alpha1.Grant, 0, len(order))
	for _, content := range order {
		grants = append(grants, *byContent[content])
	}
	return grants
}
