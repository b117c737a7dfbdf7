package membership

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// Annotations of a Member.
const (
	// annotationClusterUID is the UID of the cluster's namespace kube-system, by which a cluster that joins
	// again is told from another one under the same id.
	annotationClusterUID = "isthmus.dev/cluster-uid"
	// annotationGiven lists the values that a person gave, by the names of flags, comma-separated: a join
	// without these flags keeps them, where it finds out the others anew.
	annotationGiven = "isthmus.dev/given"
	// annotationBroker is on the copy in the member: the broker's namespace, a slash, and the UID of its
	// ClusterSetConfig, by which the broker is told from any other one.
	annotationBroker = "isthmus.dev/broker"
)

// ErrNotJoined says that a cluster is no member.
var ErrNotJoined = errors.New("this cluster is not a member of a ClusterSet")

// site is a member and its broker, found from what join left in the member.
type site struct {
	id              string
	clusterSet      string
	brokerNamespace string
	copied          *v1alpha1.Member // in the member
	registered      *v1alpha1.Member // on the broker; nil when there is none any more
	replaced        bool             // another cluster is registered under the id
}

// locate reads the membership of the cluster behind member, installed in namespace, and makes sure that
// broker is its broker. Errors: ErrNotJoined, ErrNoBroker.
func locate(ctx context.Context, broker, member client.Client, namespace string) (site, error) {
	var s site
	var err error
	if s.copied, err = ownMember(ctx, member, namespace); err != nil {
		return s, err
	}
	s.id, s.clusterSet = s.copied.Name, s.copied.Spec.ClusterSetID
	where, uid, ok := strings.Cut(s.copied.Annotations[annotationBroker], "/")
	if !ok {
		return s, fmt.Errorf("member %s was joined by an older isthmusctl and does not say where its broker is; run isthmusctl join again", s.id)
	}
	s.brokerNamespace = where
	config, err := readConfig(ctx, broker, s.brokerNamespace)
	if err != nil {
		return s, fmt.Errorf("member %s: %w", s.id, err)
	}
	if string(config.UID) != uid {
		return s, fmt.Errorf("member %s: %w: its ClusterSetConfig %s/%s is that of another ClusterSet %s; use the kubeconfig of the cluster that %s joined",
			s.id, ErrNoBroker, config.Namespace, config.Name, config.Spec.ClusterSetID, s.id)
	}
	s.registered, err = readMember(ctx, broker, s.brokerNamespace, s.id)
	if err != nil && !errors.Is(err, ErrNoMember) {
		return s, err
	}
	if m := s.registered; m != nil && m.Annotations[annotationClusterUID] != s.copied.Annotations[annotationClusterUID] {
		s.registered, s.replaced = nil, true
	}
	return s, nil
}

// ownMember returns the copy of the registration in a member. None is ErrNotJoined.
func ownMember(ctx context.Context, member client.Client, namespace string) (*v1alpha1.Member, error) {
	members := &v1alpha1.MemberList{}
	err := member.List(ctx, members, client.InNamespace(namespace))
	if err != nil && !admin.IsAbsent(err) {
		return nil, fmt.Errorf("look for the membership: %w", err)
	}
	switch n := len(members.Items); n {
	case 0:
		return nil, fmt.Errorf("%w: namespace %s has no Member; name the one in which Isthmus is installed by --namespace", ErrNotJoined, namespace)
	case 1:
		return &members.Items[0], nil
	default:
		return nil, fmt.Errorf("namespace %s has %d Members and needs exactly one; delete all but this cluster's own", namespace, n)
	}
}

// relist puts a member that was revoked back onto the ClusterSetConfig. One that has left, or is not known, is
// ErrNoMember.
func (s site) relist(ctx context.Context, broker client.Client) error {
	if s.registered == nil || s.registered.Spec.LeftAt != nil {
		return fmt.Errorf("%w: cluster %s has left; let it join again", ErrNoMember, s.id)
	}
	err := retry.RetryOnConflict(contention, func() error {
		config, err := readConfig(ctx, broker, s.brokerNamespace)
		if err != nil {
			return err
		}
		if len(withoutMember(config.Spec.Members, s.id)) < len(config.Spec.Members) {
			return nil
		}
		config.Spec.Members = withBlocks(config.Spec.Members, s.id, s.registered.Spec.ClusterSetIPCIDR)
		return broker.Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return fmt.Errorf("list cluster %s in the ClusterSetConfig: %w", s.id, err)
	}
	return publishBlocks(ctx, broker, s.brokerNamespace)
}

// readMember reads a registration on the broker, a tombstone too. None is ErrNoMember, with those there are.
func readMember(ctx context.Context, broker client.Client, namespace, id string) (*v1alpha1.Member, error) {
	members := &v1alpha1.MemberList{}
	if err := broker.List(ctx, members, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list members on the broker: %w", err)
	}
	var others []string
	for i := range members.Items {
		m := &members.Items[i]
		if m.Name == id {
			return m, nil
		}
		if m.Spec.LeftAt == nil {
			others = append(others, m.Name)
		}
	}
	there := "there are none"
	if len(others) > 0 {
		there = "there are " + strings.Join(others, ", ")
	}
	return nil, fmt.Errorf("%w: %s; %s", ErrNoMember, id, there)
}
