package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

func federationStatusCommand() *cobra.Command {
	var t target
	var namespace, format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how a supervisor sees the members of its federation",
		Long: `Say how a supervisor sees the members of its federation: who leads each, in which epoch, whether it is reached, and
how many federated Services and replicated policies it has, and how much of what it offered vanished and is held.
It exits 0 when every member is reached and led, in all that leaders do, and the supervisor's controller lives, which
says so; and 1 when not.`,
		Example: `  isthmusctl federation status --context ctx-a
  isthmusctl federation status --context ctx-a -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := tables.CheckFormat(format); err != nil {
				return err
			}
			c, err := t.connect()
			if err != nil {
				return err
			}
			f, err := readFederation(cmd.Context(), c, t)
			if err != nil {
				return err
			}
			members := statusOf(f)
			living, err := silence(cmd.Context(), c, namespace, time.Now())
			if err != nil {
				return err
			}
			return errors.Join(tables.Write(cmd.OutOrStdout(), members, format), living, members.unready(f))
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	cmd.Flags().StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	cmd.Flags().StringVarP(&format, "output", "o", "text", "text or json")
	return cmd
}

// readFederation reads that of a supervisor.
func readFederation(ctx context.Context, c client.Client, t target) (*federationv1alpha1.Federation, error) {
	f := &federationv1alpha1.Federation{}
	err := c.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, f)
	if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		return nil, fmt.Errorf("the cluster of %s is of no federation; isthmusctl federation create or add makes it a member", t.source())
	}
	if err != nil {
		return nil, err
	}
	if len(f.Spec.Members) == 0 {
		return nil, fmt.Errorf("the cluster of %s is a child of federation %s and sees no members; give --context that of a supervisor", t.source(), f.Spec.ClusterSet)
	}
	return f, nil
}

// clocks is by how much the clocks of two machines may differ.
const clocks = time.Minute

// silence returns that no controller of the supervisor lives, as its Lease shows: then what the status says is as old as that.
// The second error is that this cannot be read.
func silence(ctx context.Context, c client.Client, namespace string, now time.Time) (silent, err error) {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: namespace, Name: federationv1alpha1.ControllerLease}
	if err := c.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Lease %s, which a controller renews while it lives: %w", key, err)
	}
	const fix = "does isthmus-controller run with --federation? What is said of members is what was seen last"
	if lease.Spec.RenewTime == nil || lease.Spec.LeaseDurationSeconds == nil {
		return fmt.Errorf("no controller of this supervisor has had Lease %s; %s", key, fix), nil
	}
	if at := lease.Spec.RenewTime.Time; now.Sub(at) > time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second+clocks {
		return fmt.Errorf("no controller of this supervisor has renewed Lease %s since %s; %s", key, at.UTC().Format(time.RFC3339), fix), nil
	}
	return nil, nil
}

// memberTable is what federation status prints.
type memberTable []federationv1alpha1.MemberStatus

// statusOf returns the status of every member, also of one that the controller has not looked at.
func statusOf(f *federationv1alpha1.Federation) memberTable {
	seen := map[string]federationv1alpha1.MemberStatus{}
	for _, m := range f.Status.Members {
		seen[m.ClusterID] = m
	}
	var all memberTable
	for _, m := range f.Spec.Members {
		s, ok := seen[m.ClusterID]
		if !ok {
			s = federationv1alpha1.MemberStatus{ClusterID: m.ClusterID, Message: "this supervisor's controller has not looked at it yet; does isthmus-controller run with --federation?"}
		}
		all = append(all, s)
	}
	return all
}

// unready says what is not as it should be, or nil.
func (t memberTable) unready(f *federationv1alpha1.Federation) error {
	var errs []error
	if c := meta.FindStatusCondition(f.Status.Conditions, federationv1alpha1.ConditionReady); c != nil && c.Status == metav1.ConditionFalse {
		errs = append(errs, errors.New(c.Message))
	}
	for _, m := range t {
		switch {
		case !m.Reachable && m.Message == "":
			errs = append(errs, fmt.Errorf("member %s is not reached", m.ClusterID))
		case !m.Reachable:
			errs = append(errs, fmt.Errorf("member %s is not reached: %s", m.ClusterID, m.Message))
		case m.Leader == "":
			errs = append(errs, fmt.Errorf("member %s has no leader", m.ClusterID))
		case m.Message != "":
			errs = append(errs, fmt.Errorf("member %s: %s", m.ClusterID, m.Message))
		}
	}
	return errors.Join(errs...)
}

// Header is part of tables.Table.
func (memberTable) Header() []string {
	return []string{"MEMBER", "LEADER", "EPOCH", "REACHABLE", "SERVICES", "POLICIES", "HELD", "MESSAGE"}
}

// Rows is part of tables.Table.
func (t memberTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, m := range t {
		reachable := "no"
		if m.Reachable {
			reachable = "yes"
		}
		rows[i] = []string{
			m.ClusterID, m.Leader, strconv.FormatInt(m.Epoch, 10), reachable,
			strconv.FormatInt(m.Services, 10), strconv.FormatInt(m.Policies, 10), strconv.FormatInt(m.Held, 10), m.Message,
		}
	}
	return rows
}

// Nothing is part of tables.Table.
func (memberTable) Nothing() string { return "the federation has no members" }
