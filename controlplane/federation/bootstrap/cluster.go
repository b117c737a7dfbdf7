package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/about"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Cluster is a cluster that an administrator can reach.
type Cluster struct {
	ID         clusterset.ClusterID
	Supervisor bool
	Context    string // the name of its kubeconfig context, for errors
	Client     client.Client
	// Server is the URL at which supervisors reach the cluster. Empty takes the existing one, or Host.
	Server string
	Host   string // of the administrator's own kubeconfig
	CA     []byte // in PEM; empty means the certificates that the system trusts
	// ExternalCIDRs are the networks of the cluster's own addresses outside of it; nil keeps the existing ones.
	ExternalCIDRs []string
}

// wrap adds the cluster to err.
func (c *Cluster) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cluster %s, context %s: %w", c.ID, c.Context, err)
}

// flag returns the command-line flag that gives the cluster.
func flag(supervisor bool, id clusterset.ClusterID) string {
	if supervisor {
		return fmt.Sprintf("--supervisor %s=CONTEXT", id)
	}
	return fmt.Sprintf("--child %s=CONTEXT", id)
}

// surveyed is a cluster with the relevant objects that it has.
type surveyed struct {
	*Cluster
	uid         string                         // of namespace kube-system
	federation  *federationv1alpha1.Federation // nil is none
	supervisors []clusterset.ClusterID         // with an account in it, sorted
}

// survey holds all given clusters and their federation.
type survey struct {
	namespace string
	clusters  []*surveyed // sorted by id
	// members are the members in the Federations of the supervisors, by id.
	members map[clusterset.ClusterID]federationv1alpha1.MemberCluster
	// supervisors are those with an account in a given cluster, by id.
	supervisors map[clusterset.ClusterID]bool
}

// newSurvey reads all clusters and writes nothing. It refuses invalid ids, an id or a cluster that is given twice, and an
// id that differs from the claims of its cluster.
func newSurvey(ctx context.Context, namespace string, clusters []Cluster) (*survey, error) {
	s := &survey{
		namespace: namespace, members: map[clusterset.ClusterID]federationv1alpha1.MemberCluster{}, supervisors: map[clusterset.ClusterID]bool{},
	}
	var errs []error
	for i := range clusters {
		c := &clusters[i]
		if err := c.ID.Validate(); err != nil {
			return nil, fmt.Errorf("context %s: %w", c.Context, err)
		}
		if other := s.site(c.ID); other != nil {
			return nil, fmt.Errorf("cluster id %s is given twice, by contexts %s and %s; ids are distinct", c.ID, other.Context, c.Context)
		}
		found, err := surveyCluster(ctx, namespace, c)
		if err != nil {
			errs = append(errs, c.wrap(err))
			continue
		}
		for _, other := range s.clusters {
			if other.uid == found.uid {
				return nil, fmt.Errorf("contexts %s and %s reach the same cluster; %s and %s must be two clusters", other.Context, c.Context, other.ID, c.ID)
			}
		}
		s.clusters = append(s.clusters, found)
		s.add(found)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	slices.SortFunc(s.clusters, func(a, b *surveyed) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return s, nil
}

// add records the federation of a cluster.
func (s *survey) add(found *surveyed) {
	for _, id := range found.supervisors {
		s.supervisors[id] = true
	}
	if found.federation == nil {
		return
	}
	for _, m := range found.federation.Spec.Members {
		s.members[clusterset.ClusterID(m.ClusterID)] = m
	}
}

// site returns the cluster with an id, nil if it was not given.
func (s *survey) site(id clusterset.ClusterID) *surveyed {
	i := slices.IndexFunc(s.clusters, func(o *surveyed) bool { return o.ID == id })
	if i < 0 {
		return nil
	}
	return s.clusters[i]
}

// need returns an error unless all clusters of ids were given. why states what they are needed for.
func (s *survey) need(ids []clusterset.ClusterID, why string) error {
	var errs []error
	for _, id := range ids {
		if s.site(id) == nil {
			errs = append(errs, fmt.Errorf("cluster %s is not given; give %s, for %s", id, flag(s.supervisors[id], id), why))
		}
	}
	return errors.Join(errs...)
}

// surveyCluster reads one cluster.
func surveyCluster(ctx context.Context, namespace string, c *Cluster) (*surveyed, error) {
	found := &surveyed{Cluster: c}
	ns := &corev1.Namespace{}
	if err := c.Client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns); err != nil {
		return nil, fmt.Errorf("read namespace %s: %w", metav1.NamespaceSystem, err)
	}
	found.uid = string(ns.UID)
	if err := checkIdentity(ctx, c.Client, federationv1alpha1.ClaimID, about.ClusterID, string(c.ID)); err != nil {
		return nil, err
	}
	federation := &federationv1alpha1.Federation{}
	err := c.Client.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, federation)
	switch {
	case err == nil:
		found.federation = federation
	case !admin.IsAbsent(err):
		return nil, fmt.Errorf("read its Federation: %w", err)
	}
	accounts := &corev1.ServiceAccountList{}
	if err := c.Client.List(ctx, accounts, client.InNamespace(namespace), client.HasLabels{labelSupervisor}); err != nil {
		return nil, fmt.Errorf("list ServiceAccounts of namespace %s: %w", namespace, err)
	}
	for _, a := range accounts.Items {
		found.supervisors = append(found.supervisors, clusterset.ClusterID(a.Labels[labelSupervisor]))
	}
	slices.Sort(found.supervisors)
	return found, nil
}

// checkIdentity refuses a cluster whose ClusterClaim, or the ClusterProperty with the same meaning, has another value.
func checkIdentity(ctx context.Context, c client.Client, claim, property, value string) error {
	existing := &federationv1alpha1.ClusterClaim{}
	err := c.Get(ctx, client.ObjectKey{Name: claimName(claim)}, existing)
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("read ClusterClaim %s: %w", claimName(claim), err)
	}
	if err == nil && existing.Spec.Value != value {
		return fmt.Errorf("ClusterClaim %s is %s and not %s; use its value, or delete it if nothing relies on it", claimName(claim), existing.Spec.Value, value)
	}
	twin := &about.ClusterProperty{}
	err = c.Get(ctx, client.ObjectKey{Name: property}, twin)
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("read ClusterProperty %s: %w", property, err)
	}
	if err == nil && twin.Spec.Value != value {
		return fmt.Errorf("ClusterProperty %s is %s and not %s; use its value, or change it if nothing relies on it", property, twin.Spec.Value, value)
	}
	return nil
}

// claimName returns the name of the object of a claim.
func claimName(claim string) string { return strings.ToLower(claim) }

// server returns the URL at which supervisors will reach a cluster.
func (c *Cluster) server(known string) (string, error) {
	text := c.Server
	if text == "" {
		text = known
	}
	if text == "" {
		text = c.Host
		if !strings.Contains(text, "://") {
			text = "https://" + text
		}
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" {
		return "", fmt.Errorf("%q is not a URL at which supervisors can reach its API server; give --server %s=https://HOST:PORT", text, c.ID)
	}
	return strings.TrimSuffix(text, "/"), nil
}
