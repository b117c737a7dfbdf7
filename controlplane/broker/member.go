package broker

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

// member is the registration of this cluster.
type member struct {
	id   clusterset.ClusterID
	pool *clusterset.IPPool
	spec v1alpha1.MemberSpec
}

// readMember reads the only Member in the installation namespace.
func readMember(ctx context.Context, cfg Config, scheme *runtime.Scheme) (member, error) {
	c, err := client.New(cfg.Local, client.Options{Scheme: scheme})
	if err != nil {
		return member{}, fmt.Errorf("prepare a client of %s: %w", cfg.Local.Host, err)
	}
	var members v1alpha1.MemberList
	err = c.List(ctx, &members, client.InNamespace(cfg.Namespace))
	switch {
	case meta.IsNoMatchError(err), apierrors.IsNotFound(err):
		return member{}, fmt.Errorf("API server %s has no Member kind, so this cluster has not joined; run isthmusctl join", cfg.Local.Host)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return member{}, fmt.Errorf("API server %s forbids the controller to read Members in namespace %s; the Helm chart grants the right: %w", cfg.Local.Host, cfg.Namespace, err)
	case err != nil:
		return member{}, fmt.Errorf("cannot read the registration from API server %s of this cluster; check its address and the network: %w", cfg.Local.Host, err)
	}
	switch n := len(members.Items); n {
	case 0:
		return member{}, fmt.Errorf("namespace %s has no Member, so this cluster has not joined; run isthmusctl join", cfg.Namespace)
	case 1:
		return parseMember(&members.Items[0])
	default:
		var names []string
		for _, m := range members.Items {
			names = append(names, m.Name)
		}
		return member{}, fmt.Errorf("namespace %s has %d Members (%s) and needs exactly one; delete all but this cluster's own", cfg.Namespace, n, strings.Join(names, ", "))
	}
}

// parseMember checks a registration. Its error joins all faults.
func parseMember(m *v1alpha1.Member) (member, error) {
	parsed, err := mcs.Member(m)
	pool, poolErr := clusterset.NewIPPool(parsed.Blocks...)
	if err := errors.Join(err, poolErr); err != nil {
		return member{}, fmt.Errorf("member %s; run isthmusctl join again with other values: %w", m.Name, err)
	}
	return member{id: parsed.ID, pool: pool, spec: m.Spec}, nil
}
