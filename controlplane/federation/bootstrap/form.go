package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Formation is a federation as it shall be, as far as the clusters go that were given.
type Formation struct {
	// ClusterSet is its id; empty is what the clusters say already.
	ClusterSet string
	// Namespace is where Isthmus is installed in every cluster.
	Namespace string
	// Clusters are all that have to do with it: new ones, every supervisor, and with a new supervisor every member.
	Clusters []Cluster
}

// Formed is a federation.
type Formed struct {
	ClusterSet string
	Members    []Member
}

// Member is one cluster of a federation.
type Member struct {
	ID         clusterset.ClusterID
	Server     string
	Supervisor bool
	New        bool // it was none before
}

// Form makes the clusters a federation, or takes new ones into the one that is there. It reads all of them before it
// writes anything, and refuses what cannot be: an id that another cluster has, one that says that it is somebody else
// or belongs to another ClusterSet, a supervisor or a member that has to be told and was not given. Doing it again,
// also after it was cut off, finds what is done, and keeps the tokens.
func Form(ctx context.Context, f Formation) (Formed, error) {
	s, err := look(ctx, f.Namespace, f.Clusters)
	if err != nil {
		return Formed{}, err
	}
	formed, err := s.plan(ctx, f.ClusterSet)
	if err != nil {
		return Formed{}, err
	}
	definitions := make([]admin.Definitions, len(s.sites))
	for i, found := range s.sites {
		if definitions[i], err = admin.PlanDefinitions(ctx, found.Client); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	for i, found := range s.sites {
		if err := definitions[i].Apply(ctx, found.Client); err != nil {
			return Formed{}, found.wrap(err)
		}
		if err := s.prepare(ctx, found.Cluster, formed.ClusterSet); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	// A supervisor learns of a member when it has the token for it.
	for _, supervisor := range s.sites {
		if !supervisor.Supervisor {
			continue
		}
		for _, member := range s.sites {
			_, token, err := s.open(ctx, member.Cluster, supervisor.ID, false)
			if err != nil {
				return Formed{}, member.wrap(err)
			}
			if err := s.hand(ctx, supervisor.Cluster, member.Cluster, token); err != nil {
				return Formed{}, supervisor.wrap(err)
			}
		}
	}
	for _, found := range s.sites {
		if err := s.name(ctx, found, formed.ClusterSet); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	return formed, nil
}

// plan says what the federation will be, and sets what supervisors shall know of members.
func (s *survey) plan(ctx context.Context, clusterSet string) (Formed, error) {
	var formed Formed
	var err error
	if formed.ClusterSet, err = s.clusterSet(ctx, clusterSet); err != nil {
		return formed, err
	}
	if err := s.checkTold(); err != nil {
		return formed, err
	}
	for _, found := range s.sites {
		known, was := s.members[found.ID]
		if was && known.ClusterUID != "" && known.ClusterUID != found.uid {
			return formed, found.wrap(fmt.Errorf("another cluster is member %s; remove that one first by isthmusctl federation remove %s --gone, or choose another id", found.ID, found.ID))
		}
		server, err := found.server(known.Server)
		if err != nil {
			return formed, found.wrap(err)
		}
		s.members[found.ID] = federationv1alpha1.MemberCluster{
			ClusterID: string(found.ID), Server: server, Secret: secretPrefix + string(found.ID), ClusterUID: found.uid,
		}
		if found.Supervisor {
			s.supervisors[found.ID] = true
		}
		formed.Members = append(formed.Members, Member{ID: found.ID, Server: server, Supervisor: found.Supervisor, New: !was})
	}
	return formed, nil
}

// clusterSet returns the federation's id: what was asked for, or what the clusters say. They must not disagree.
func (s *survey) clusterSet(ctx context.Context, asked string) (string, error) {
	id, from := asked, "--clusterset"
	for _, found := range s.sites {
		if found.federation == nil {
			continue
		}
		said := found.federation.Spec.ClusterSet
		if id == "" {
			id, from = said, fmt.Sprintf("cluster %s", found.ID)
		}
		if said != id {
			return "", found.wrap(fmt.Errorf("it belongs to the federation %s, and not to %s, which %s says; remove it from that one first", said, id, from))
		}
	}
	if id == "" {
		return "", errors.New("no cluster is of a federation yet; name it by --clusterset")
	}
	if err := clusterset.ClusterID(id).Validate(); err != nil {
		return "", fmt.Errorf("the ClusterSet's id is named like a cluster's: %w", err)
	}
	for _, found := range s.sites {
		if err := checkSaid(ctx, found.Client, federationv1alpha1.ClaimClusterSet, about.ClusterSet, id); err != nil {
			return "", found.wrap(err)
		}
	}
	return id, nil
}

// checkTold reports which clusters have to be given, too: every supervisor, since it has to learn of new members, and
// with a new supervisor every member, since it needs an account there.
func (s *survey) checkTold() error {
	fresh := ""
	supervised := false
	for _, found := range s.sites {
		if s.supervisors[found.ID] && !found.Supervisor {
			return found.wrap(fmt.Errorf("it is a supervisor; give it as --supervisor %s=%s", found.ID, found.Context))
		}
		if found.Supervisor && !s.supervisors[found.ID] {
			fresh = string(found.ID)
		}
		supervised = supervised || found.Supervisor
	}
	if !supervised {
		return errors.New("no supervisor is given; a federation needs one at least, which reaches all members: give --supervisor ID=CONTEXT")
	}
	err := s.need(slices.Sorted(maps.Keys(s.supervisors)), "every supervisor has to know all members")
	if fresh != "" {
		err = errors.Join(err, s.need(slices.Sorted(maps.Keys(s.members)), "the new supervisor "+fresh+" needs an account in it"))
	}
	return err
}

// prepare puts into a cluster what every member has: what it says of itself, the policies that keep leaders in line,
// and what leaders may do.
func (s *survey) prepare(ctx context.Context, c *Cluster, clusterSet string) error {
	claims := map[string]string{federationv1alpha1.ClaimID: string(c.ID), federationv1alpha1.ClaimClusterSet: clusterSet}
	if c.Supervisor {
		claims[federationv1alpha1.ClaimSupervisor] = "true"
	}
	wanted := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}}
	if system := s.systemNamespace(); system != s.namespace {
		wanted = append(wanted, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}})
	}
	for _, name := range slices.Sorted(maps.Keys(claims)) {
		there, err := said(ctx, c.Client, name)
		if err != nil {
			return err
		}
		if there { // and says the same, or look had refused
			continue
		}
		wanted = append(wanted, &federationv1alpha1.ClusterClaim{
			ObjectMeta: metav1.ObjectMeta{Name: claimName(name), Labels: admin.Ours()},
			Spec:       federationv1alpha1.ClusterClaimSpec{Name: name, Value: claims[name]},
		})
	}
	wanted = append(wanted, roles(c.Client, s.namespace, c.ID, s.kinds())...)
	wanted = append(wanted, admission.Claims()...)
	wanted = append(wanted, admission.Fence(s.namespace, c.ID)...)
	wanted = append(wanted, admission.Own(s.namespace)...)
	for _, obj := range wanted {
		err := admin.Apply(ctx, c.Client, obj)
		if meta.IsNoMatchError(err) {
			return fmt.Errorf("the cluster cannot be a member, for nothing would keep a leader that was from writing; it needs Kubernetes 1.30 or newer: %w", err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// systemNamespace returns where global federated Services are, as the supervisors say.
func (s *survey) systemNamespace() string {
	for _, found := range s.sites {
		if found.federation != nil && found.federation.Spec.SystemNamespace != "" {
			return found.federation.Spec.SystemNamespace
		}
	}
	return federationv1alpha1.DefaultSystemNamespace
}

// said reports whether a cluster has a claim.
func said(ctx context.Context, c client.Client, claim string) (bool, error) {
	err := c.Get(ctx, client.ObjectKey{Name: claimName(claim)}, &federationv1alpha1.ClusterClaim{})
	if err != nil && !admin.IsAbsent(err) {
		return false, fmt.Errorf("read ClusterClaim %s: %w", claimName(claim), err)
	}
	return err == nil, nil
}

// name writes the Federation of a cluster. What people set in it beside the members stays.
func (s *survey) name(ctx context.Context, found *site, clusterSet string) error {
	f := &federationv1alpha1.Federation{
		ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName},
		Spec:       federationv1alpha1.FederationSpec{ClusterSet: clusterSet},
	}
	if have := found.federation; have == nil || have.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy {
		f.Labels = admin.Ours()
	}
	if found.Supervisor {
		f.Spec.Members = slices.SortedFunc(maps.Values(s.members), func(a, b federationv1alpha1.MemberCluster) int {
			return strings.Compare(a.ClusterID, b.ClusterID)
		})
	}
	return admin.Apply(ctx, found.Client, f)
}
