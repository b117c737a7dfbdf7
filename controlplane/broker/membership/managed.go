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
	// annotationClusterUID is the UID of the cluster's namespace kube-system. It distinguishes a cluster that joins again
	// from another one with the same id.
	annotationClusterUID = "isthmus.dev/cluster-uid"
	// annotationGiven lists the flags that the administrator gave, comma-separated: a later join without these flags keeps
	// their values, and discovers the others again.
	annotationGiven = "isthmus.dev/given"
	// annotationBroker on the copy in the member is the broker's namespace, a slash, and the UID of its ClusterSetConfig,
	// which identifies the broker.
	annotationBroker = "isthmus.dev/broker"
)

// ErrNotJoined means that a cluster is not a member.
var ErrNotJoined = errors.New("this cluster is not a member of a ClusterSet")

// managedMember is a member with its broker, found from the objects that join wrote into the member.
type managedMember struct {
	id              string
	clusterSet      string
	brokerNamespace string
	copied          *v1alpha1.Member // in the member
	registered      *v1alpha1.Member // on the broker; nil if it is gone
	replaced        bool             // another cluster has the id by now
}

// locate reads the membership of the cluster behind member, installed in namespace, and verifies that broker is its broker.
// Errors: ErrNotJoined, ErrNoBroker.
func locate(ctx context.Context, broker, member client.Client, namespace string) (managedMember, error) {
	var m managedMember
	var err error
	if m.copied, err = ownMember(ctx, member, namespace); err != nil {
		return m, err
	}
	m.id, m.clusterSet = m.copied.Name, m.copied.Spec.ClusterSetID
	where, uid, ok := strings.Cut(m.copied.Annotations[annotationBroker], "/")
	if !ok {
		return m, fmt.Errorf("member %s was joined by an older isthmusctl and does not name its broker; run isthmusctl join again", m.id)
	}
	m.brokerNamespace = where
	config, err := readConfig(ctx, broker, m.brokerNamespace)
	if err != nil {
		return m, fmt.Errorf("member %s: %w", m.id, err)
	}
	if string(config.UID) != uid {
		return m, fmt.Errorf("member %s: %w: its ClusterSetConfig %s/%s is that of another ClusterSet %s; use the kubeconfig of the cluster that %s joined",
			m.id, ErrNoBroker, config.Namespace, config.Name, config.Spec.ClusterSetID, m.id)
	}
	m.registered, err = readMember(ctx, broker, m.brokerNamespace, m.id)
	if err != nil && !errors.Is(err, ErrNoMember) {
		return m, err
	}
	if r := m.registered; r != nil && r.Annotations[annotationClusterUID] != m.copied.Annotations[annotationClusterUID] {
		m.registered, m.replaced = nil, true
	}
	return m, nil
}

// ownMember returns the copy of the registration in a member, or ErrNotJoined.
func ownMember(ctx context.Context, member client.Client, namespace string) (*v1alpha1.Member, error) {
	members := &v1alpha1.MemberList{}
	err := member.List(ctx, members, client.InNamespace(namespace))
	if err != nil && !admin.IsAbsent(err) {
		return nil, fmt.Errorf("list Members: %w", err)
	}
	switch n := len(members.Items); n {
	case 0:
		return nil, fmt.Errorf("%w: namespace %s has no Member; give the namespace in which Isthmus is installed with --namespace", ErrNotJoined, namespace)
	case 1:
		return &members.Items[0], nil
	default:
		return nil, fmt.Errorf("namespace %s has %d Members and needs exactly one; delete all but this cluster's own", namespace, n)
	}
}

// relist adds a revoked member to the ClusterSetConfig again, and returns that. It returns ErrNoMember for one that has left or
// is unknown.
func (m managedMember) relist(ctx context.Context, broker client.Client) (config *v1alpha1.ClusterSetConfig, err error) {
	if m.registered == nil || m.registered.Spec.LeftAt != nil {
		return nil, fmt.Errorf("%w: cluster %s has left; let it join again", ErrNoMember, m.id)
	}
	err = retry.RetryOnConflict(contention, func() error {
		if config, err = readConfig(ctx, broker, m.brokerNamespace); err != nil {
			return err
		}
		if len(withoutMember(config.Spec.Members, m.id)) < len(config.Spec.Members) {
			return nil
		}
		config.Spec.Members = withBlocks(config.Spec.Members, m.id, m.registered.Spec.ClusterSetIPCIDR)
		return broker.Update(ctx, config, admin.FieldOwner)
	})
	if err != nil {
		return nil, fmt.Errorf("list cluster %s in the ClusterSetConfig: %w", m.id, err)
	}
	return config, publishBlocks(ctx, broker, m.brokerNamespace)
}

// readMember reads a registration on the broker, which may be a tombstone. It returns ErrNoMember, with a list of the
// members, if there is none.
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
	known := "the broker has no members"
	if len(others) > 0 {
		known = "the members are " + strings.Join(others, ", ")
	}
	return nil, fmt.Errorf("%w: %s; %s", ErrNoMember, id, known)
}
