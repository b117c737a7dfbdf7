package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/services"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Formation describes a federation to form, or members to add to one.
type Formation struct {
	// ClusterSet is the id of the ClusterSet; empty takes the id that the clusters have already.
	ClusterSet string
	// Namespace is the namespace of Isthmus in every cluster.
	Namespace string
	// Clusters are the new clusters and every supervisor; with a new supervisor, also every member.
	Clusters []Cluster
	// Grants, if not nil, is asked before anything is written whether the Federation gets spec.grants, if it has none. What it is given
	// allows only what takes part now. An error of it is returned. Nil leaves the Federation without.
	Grants func(proposed []federationv1alpha1.Grant) error
}

// Formed is the result of Form.
type Formed struct {
	ClusterSet string
	Members    []Member
	LeftOut    []LeftOut
}

// LeftOut is a Service of a cluster that asks to join a federated one and cannot.
type LeftOut struct {
	Member  clusterset.ClusterID
	Service clusterset.ServiceName
	Why     error
}

// Member is one cluster of a federation.
type Member struct {
	ID         clusterset.ClusterID
	Server     string
	Supervisor bool
	New        bool // it was not a member before
}

// Form makes the clusters a federation, or adds new ones to an existing federation. It reads all of them before it writes
// anything. It refuses an id that another cluster has, a cluster with another id or ClusterSet, and a missing supervisor or
// member that the change concerns. A repeated call, also after an interruption, completes the work and keeps the tokens.
func Form(ctx context.Context, f Formation) (Formed, error) {
	s, err := newSurvey(ctx, f.Namespace, f.Clusters)
	if err != nil {
		return Formed{}, err
	}
	formed, err := s.plan(ctx, f.ClusterSet)
	if err != nil {
		return Formed{}, err
	}
	definitions := make([]admin.Definitions, len(s.clusters))
	for i, found := range s.clusters {
		if definitions[i], err = admin.PlanDefinitions(ctx, found.Client); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	granted := s.grants()
	if granted == nil && f.Grants != nil {
		if granted, err = s.close(ctx, f.Grants); err != nil {
			return Formed{}, err
		}
	}
	for i, found := range s.clusters {
		if err := definitions[i].Apply(ctx, found.Client); err != nil {
			return Formed{}, found.wrap(err)
		}
		if err := s.prepare(ctx, found.Cluster, formed.ClusterSet); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	// A supervisor gets the token for a member before its Federation names the member.
	for _, supervisor := range s.clusters {
		if !supervisor.Supervisor {
			continue
		}
		for _, member := range s.clusters {
			if err := s.ensureToken(ctx, supervisor.Cluster, member.Cluster); err != nil {
				return Formed{}, err
			}
		}
	}
	for _, found := range s.clusters {
		if err := s.writeFederation(ctx, found, formed.ClusterSet, granted); err != nil {
			return Formed{}, found.wrap(err)
		}
	}
	formed.LeftOut, err = s.leftOut(ctx)
	return formed, err
}

// leftOut returns the Services of the given clusters that ask to join a federated one and cannot, sorted.
func (s *survey) leftOut(ctx context.Context) (all []LeftOut, err error) {
	for _, found := range s.clusters {
		err := s.eachJoining(ctx, found, func(svc *corev1.Service, _ clusterset.ServiceName) {
			if err := services.Fault(svc, s.members[found.ID]); err != nil {
				all = append(all, LeftOut{found.ID, clusterset.ServiceName{Namespace: svc.Namespace, Name: svc.Name}, err})
			}
		})
		if err != nil {
			return nil, found.wrap(err)
		}
	}
	return all, nil
}

// plan computes the federation and the member list of its supervisors.
func (s *survey) plan(ctx context.Context, clusterSet string) (Formed, error) {
	var formed Formed
	var err error
	if formed.ClusterSet, err = s.clusterSet(ctx, clusterSet); err != nil {
		return formed, err
	}
	if err := s.checkGiven(); err != nil {
		return formed, err
	}
	for _, found := range s.clusters {
		known, was := s.members[found.ID]
		if was && known.ClusterUID != "" && known.ClusterUID != found.uid {
			return formed, found.wrap(fmt.Errorf("another cluster is member %s; remove that one first by isthmusctl federation remove %s --gone, or choose another id", found.ID, found.ID))
		}
		server, err := found.server(known.Server)
		if err != nil {
			return formed, found.wrap(err)
		}
		external := found.ExternalCIDRs
		if external == nil {
			external = known.ExternalCIDRs
		}
		s.members[found.ID] = federationv1alpha1.MemberCluster{
			ClusterID: string(found.ID), Server: server, Secret: secretPrefix + string(found.ID), ClusterUID: found.uid,
			ExternalCIDRs: external,
		}
		if found.Supervisor {
			s.supervisors[found.ID] = true
		}
		formed.Members = append(formed.Members, Member{ID: found.ID, Server: server, Supervisor: found.Supervisor, New: !was})
	}
	return formed, nil
}

// clusterSet returns the id of the ClusterSet: the requested one, or that of the clusters. They must not differ.
func (s *survey) clusterSet(ctx context.Context, asked string) (string, error) {
	id, from := asked, "--clusterset"
	for _, found := range s.clusters {
		if found.federation == nil {
			continue
		}
		existing := found.federation.Spec.ClusterSet
		if id == "" {
			id, from = existing, fmt.Sprintf("cluster %s", found.ID)
		}
		if existing != id {
			return "", found.wrap(fmt.Errorf("it belongs to the federation %s, and not to %s, the id from %s; remove it from that one first", existing, id, from))
		}
	}
	if id == "" {
		return "", errors.New("none of the clusters is part of a federation yet; give its name by --clusterset")
	}
	if err := clusterset.ClusterID(id).Validate(); err != nil {
		return "", fmt.Errorf("the ClusterSet's id has to be a valid cluster id: %w", err)
	}
	for _, found := range s.clusters {
		if err := checkIdentity(ctx, found.Client, federationv1alpha1.ClaimClusterSet, about.ClusterSet, id); err != nil {
			return "", found.wrap(err)
		}
	}
	return id, nil
}

// checkGiven reports clusters that are missing: every supervisor, since it needs new members in its list, and with a new
// supervisor every member, since it needs an account there.
func (s *survey) checkGiven() error {
	fresh := ""
	supervised := false
	for _, found := range s.clusters {
		if s.supervisors[found.ID] && !found.Supervisor {
			return found.wrap(fmt.Errorf("it is a supervisor; give it as --supervisor %s=%s", found.ID, found.Context))
		}
		if found.Supervisor && !s.supervisors[found.ID] {
			fresh = string(found.ID)
		}
		supervised = supervised || found.Supervisor
	}
	if !supervised {
		return errors.New("no supervisor is given; a federation needs at least one, which reaches all members: give --supervisor ID=CONTEXT")
	}
	err := s.need(slices.Sorted(maps.Keys(s.supervisors)), "every supervisor has to know all members")
	if fresh != "" {
		err = errors.Join(err, s.need(slices.Sorted(maps.Keys(s.members)), "the new supervisor "+fresh+" needs an account in it"))
	}
	return err
}

// prepare writes the objects that every member has: its claims, the admission policies, and the rights of leaders.
func (s *survey) prepare(ctx context.Context, c *Cluster, clusterSet string) error {
	claims := map[string]string{federationv1alpha1.ClaimID: string(c.ID), federationv1alpha1.ClaimClusterSet: clusterSet}
	wanted := []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}}
	if c.Supervisor {
		claims[federationv1alpha1.ClaimSupervisor] = "true"
		wanted = append(wanted, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.SecretNamespace}})
		wanted = append(wanted, secretRights(s.namespace, s.secretNames()...)...)
	}
	if system := s.systemNamespace(); system != s.namespace {
		wanted = append(wanted, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}})
	}
	for _, name := range slices.Sorted(maps.Keys(claims)) {
		there, err := hasClaim(ctx, c.Client, name)
		if err != nil {
			return err
		}
		if there { // with the same value, or survey had refused it
			continue
		}
		wanted = append(wanted, &federationv1alpha1.ClusterClaim{
			ObjectMeta: metav1.ObjectMeta{Name: claimName(name), Labels: admin.Ours()},
			Spec:       federationv1alpha1.ClusterClaimSpec{Name: name, Value: claims[name]},
		})
	}
	wanted = append(wanted, roles(c.Client.RESTMapper(), s.namespace, c.ID, s.kinds())...)
	wanted = append(wanted, s.policies(ctx, c)...)
	for _, obj := range wanted {
		err := apply(ctx, c.Client, obj)
		if meta.IsNoMatchError(err) {
			return fmt.Errorf("the cluster cannot be a member: without ValidatingAdmissionPolicies it could not reject writes from a former leader; it needs Kubernetes 1.30 or newer: %w", err)
		}
		if err != nil {
			return err
		}
	}
	return admin.InstallFences(ctx, c.Client, s.namespace)
}

// policies returns the admission policies that the API server of c can evaluate.
func (s *survey) policies(ctx context.Context, c *Cluster) []client.Object {
	all := admission.Policies(s.namespace, c.ID)
	trial, _ := admission.VIPs(s.namespace)[0].DeepCopyObject().(client.Object)
	trial.SetName(trial.GetName() + ".trial") // it is not written
	if err := c.Client.Create(ctx, trial, client.DryRunAll); apierrors.IsInvalid(err) {
		all = slices.DeleteFunc(all, func(o client.Object) bool { return o.GetName() == admission.VIPsName })
		all = append(all, admission.NoVIPs(s.namespace)...)
	}
	return all
}

// apply writes an object of a member, unless its chart has: a release that may change it is installed there.
func apply(ctx context.Context, c client.Client, obj client.Object) error {
	installed, err := admin.ByChart(ctx, c, obj)
	if installed || err != nil {
		return err
	}
	return admin.Apply(ctx, c, obj)
}

// clusterSetIP returns the settings of ClusterSetIPs in the Federations of the supervisors.
func (s *survey) clusterSetIP() federationv1alpha1.ClusterSetIPSpec {
	for _, found := range s.clusters {
		if f := found.federation; found.Supervisor && f != nil && len(f.Spec.ClusterSetIP.Ranges) > 0 {
			return f.Spec.ClusterSetIP
		}
	}
	return federationv1alpha1.ClusterSetIPSpec{}
}

// systemNamespace returns the namespace of global federated Services, from the Federations of the supervisors.
func (s *survey) systemNamespace() string {
	for _, found := range s.clusters {
		if found.federation != nil && found.federation.Spec.SystemNamespace != "" {
			return found.federation.Spec.SystemNamespace
		}
	}
	return federationv1alpha1.DefaultSystemNamespace
}

// hasClaim reports whether a cluster has a claim.
func hasClaim(ctx context.Context, c client.Client, claim string) (bool, error) {
	err := c.Get(ctx, client.ObjectKey{Name: claimName(claim)}, &federationv1alpha1.ClusterClaim{})
	if err != nil && !admin.IsAbsent(err) {
		return false, fmt.Errorf("read ClusterClaim %s: %w", claimName(claim), err)
	}
	return err == nil, nil
}

// close returns the proposed grants if ask agrees. What a member has decides them, so every member is needed.
func (s *survey) close(ctx context.Context, ask func([]federationv1alpha1.Grant) error) ([]federationv1alpha1.Grant, error) {
	if err := s.need(slices.Sorted(maps.Keys(s.members)), "what it has decides the grants; or leave the federation open"); err != nil {
		return nil, err
	}
	proposed, err := s.propose(ctx)
	if err != nil {
		return nil, err
	}
	return proposed, ask(proposed)
}

// writeFederation writes the Federation of a cluster, of a supervisor with grants unless it has its own. Fields that users set, members
// excluded, stay.
func (s *survey) writeFederation(ctx context.Context, found *surveyed, clusterSet string, grants []federationv1alpha1.Grant) error {
	f := &federationv1alpha1.Federation{
		ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName},
		Spec:       federationv1alpha1.FederationSpec{ClusterSet: clusterSet},
	}
	if have := found.federation; have == nil || have.Labels[v1alpha1.LabelManagedBy] == v1alpha1.ManagedBy {
		f.Labels = admin.Ours()
	}
	if found.Supervisor {
		f.Spec.Grants = grants
		if found.federation != nil && found.federation.Spec.Grants != nil {
			f.Spec.Grants = found.federation.Spec.Grants
		}
		f.Spec.Members = slices.SortedFunc(maps.Values(s.members), func(a, b federationv1alpha1.MemberCluster) int {
			return strings.Compare(a.ClusterID, b.ClusterID)
		})
	} else {
		f.Spec.ClusterSetIP = s.clusterSetIP() // its policy VIPs and its nodes compare with the ranges
	}
	return admin.Apply(ctx, found.Client, f)
}
