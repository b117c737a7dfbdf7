// Package grants decides which Services and policies of which members take part in a federation, by spec.grants of the Federation.
// All supervisors have the same grants, so all leaders decide alike.
package grants

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// Rules are the grants of a Federation. The zero value grants everything.
type Rules struct {
	grants []v1alpha1.Grant
	closed bool
}

// New returns the grants of a spec. It keeps them: the caller does not change them any more.
func New(spec v1alpha1.FederationSpec) Rules {
	return Rules{grants: spec.Grants, closed: spec.Grants != nil}
}

// Service returns an error for the owner of a Service of a namespace of a member that may not join the federated Service fed.
// A global one has a namespace of its own, global.
func (r Rules) Service(member clusterset.ClusterID, namespace string, fed clusterset.ServiceName, global bool) error {
	field, names := "services", func(g v1alpha1.Grant) []v1alpha1.Pattern { return g.Services }
	if global {
		field, names = "globalServices", func(g v1alpha1.Grant) []v1alpha1.Pattern { return g.GlobalServices }
	}
	if r.granted(member, namespace, fed.Name, names) {
		return nil
	}
	return fmt.Errorf("no grant of the Federation lets namespace %s of cluster %s join federated Service %s; an administrator adds one to spec.grants, "+
		"such as {namespaces: [%[1]s], %[4]s: [%[5]s]}", namespace, member, fed, field, fed.Name)
}

// Policy returns an error for the owner of a policy that may not be replicated from a member. namespace is "" for a
// policy without one.
func (r Rules) Policy(member clusterset.ClusterID, namespace, name string) error {
	if namespace == "" {
		if r.granted(member, "", name, func(g v1alpha1.Grant) []v1alpha1.Pattern { return g.ClusterPolicies }) {
			return nil
		}
		return fmt.Errorf("no grant of the Federation lets cluster %s replicate it; an administrator adds one to spec.grants, such as {members: [%[1]s], clusterPolicies: [%[2]s]}",
			member, name)
	}
	if !clusterset.IsShared(namespace) {
		return fmt.Errorf("namespace %s belongs to each cluster alone; its policies are not replicated", namespace)
	}
	if r.granted(member, namespace, name, func(g v1alpha1.Grant) []v1alpha1.Pattern { return g.Policies }) {
		return nil
	}
	return fmt.Errorf("no grant of the Federation lets namespace %s of cluster %s replicate it; an administrator adds one to spec.grants, such as {namespaces: [%[1]s], policies: [%[3]s]}",
		namespace, member, name)
}

// granted reports whether a grant for a namespace of a member, "" for objects without one, has name among names.
func (r Rules) granted(member clusterset.ClusterID, namespace, name string, names func(v1alpha1.Grant) []v1alpha1.Pattern) bool {
	return !r.closed || slices.ContainsFunc(r.grants, func(g v1alpha1.Grant) bool {
		return (len(g.Members) == 0 || slices.Contains(g.Members, string(member))) &&
			(namespace == "" || matches(g.Namespaces, namespace)) && matches(names(g), name)
	})
}

func matches(patterns []v1alpha1.Pattern, name string) bool {
	return slices.ContainsFunc(patterns, func(p v1alpha1.Pattern) bool {
		start, open := strings.CutSuffix(string(p), "*")
		return open && strings.HasPrefix(name, start) || name == string(p)
	})
}
