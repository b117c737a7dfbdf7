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

// Cluster is one that an administrator can reach.
type Cluster struct {
	ID         clusterset.ClusterID
	Supervisor bool
	Context    string // what the person who gave it calls it; errors name it
	Client     client.Client
	// Server is the URL at which supervisors reach the cluster. Empty is what they know already, or else Host.
	Server string
	Host   string // of the administrator's own kubeconfig
	CA     []byte // in PEM; none is the certificates that the system trusts
}

// wrap says in which cluster err happened.
func (c *Cluster) wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cluster %s, context %s: %w", c.ID, c.Context, err)
}

// flag is how the person gives the cluster.
func flag(supervisor bool, id clusterset.ClusterID) string {
	if supervisor {
		return fmt.Sprintf("--supervisor %s=CONTEXT", id)
	}
	return fmt.Sprintf("--child %s=CONTEXT", id)
}

// site is a cluster, and what was found in it.
type site struct {
	*Cluster
	uid         string                         // of namespace kube-system
	federation  *federationv1alpha1.Federation // nil is none
	supervisors []clusterset.ClusterID         // that have accounts in it, sorted
}

// survey is all clusters that were given, and what they say of the federation.
type survey struct {
	namespace string
	sites     []*site // sorted by id
	// members is what the supervisors among them say, by id.
	members map[clusterset.ClusterID]federationv1alpha1.MemberCluster
	// supervisors are those of which a cluster that was given says so, by id.
	supervisors map[clusterset.ClusterID]bool
}

// look reads all clusters and writes nothing. It refuses ids that are none, are given twice, or belong to a cluster
// that says something else of itself, and a cluster that is given twice.
func look(ctx context.Context, namespace string, clusters []Cluster) (*survey, error) {
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
		found, err := visit(ctx, namespace, c)
		if err != nil {
			errs = append(errs, c.wrap(err))
			continue
		}
		for _, other := range s.sites {
			if other.uid == found.uid {
				return nil, fmt.Errorf("contexts %s and %s reach one and the same cluster; %s and %s have to be two", other.Context, c.Context, other.ID, c.ID)
			}
		}
		s.sites = append(s.sites, found)
		s.learn(found)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	slices.SortFunc(s.sites, func(a, b *site) int { return strings.Compare(string(a.ID), string(b.ID)) })
	return s, nil
}

// learn adds what a cluster says of others.
func (s *survey) learn(found *site) {
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

// site returns the cluster of an id, nil when it was not given.
func (s *survey) site(id clusterset.ClusterID) *site {
	i := slices.IndexFunc(s.sites, func(o *site) bool { return o.ID == id })
	if i < 0 {
		return nil
	}
	return s.sites[i]
}

// need returns an error unless all clusters of ids were given. why says what for.
func (s *survey) need(ids []clusterset.ClusterID, why string) error {
	var errs []error
	for _, id := range ids {
		if s.site(id) == nil {
			errs = append(errs, fmt.Errorf("cluster %s is not given; give %s, for %s", id, flag(s.supervisors[id], id), why))
		}
	}
	return errors.Join(errs...)
}

// visit reads one cluster.
func visit(ctx context.Context, namespace string, c *Cluster) (*site, error) {
	found := &site{Cluster: c}
	ns := &corev1.Namespace{}
	if err := c.Client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, ns); err != nil {
		return nil, fmt.Errorf("read namespace %s: %w", metav1.NamespaceSystem, err)
	}
	found.uid = string(ns.UID)
	if err := checkSaid(ctx, c.Client, federationv1alpha1.ClaimID, about.ClusterID, string(c.ID)); err != nil {
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

// checkSaid refuses a cluster that says something else of itself than value: by a ClusterClaim, or by the
// ClusterProperty that means the same.
func checkSaid(ctx context.Context, c client.Client, claim, property, value string) error {
	said := &federationv1alpha1.ClusterClaim{}
	err := c.Get(ctx, client.ObjectKey{Name: claimName(claim)}, said)
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("read ClusterClaim %s: %w", claimName(claim), err)
	}
	if err == nil && said.Spec.Value != value {
		return fmt.Errorf("ClusterClaim %s says %s and not %s; use what it says, or delete it if nobody relies on it", claimName(claim), said.Spec.Value, value)
	}
	also := &about.ClusterProperty{}
	err = c.Get(ctx, client.ObjectKey{Name: property}, also)
	if err != nil && !admin.IsAbsent(err) {
		return fmt.Errorf("read ClusterProperty %s: %w", property, err)
	}
	if err == nil && also.Spec.Value != value {
		return fmt.Errorf("ClusterProperty %s says %s and not %s; use what it says, or change it if nobody relies on it", property, also.Spec.Value, value)
	}
	return nil
}

// claimName returns the name of the object of a claim.
func claimName(claim string) string { return strings.ToLower(claim) }

// server returns the URL at which supervisors shall reach a cluster.
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
		return "", fmt.Errorf("%q is no URL at which supervisors can reach its API server; give --server %s=https://HOST:PORT", text, c.ID)
	}
	return strings.TrimSuffix(text, "/"), nil
}
