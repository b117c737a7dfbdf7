package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	coordinationv1 "k8s.io/api/coordination/v1"
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
		Short: "Show the members of a federation as a supervisor sees them",
		Long: `Show the members of a federation as a supervisor sees them: the leader of each and its epoch, whether the member is
reachable, and the numbers of its federated Services, replicated policies and held withdrawals. The exit code is 0 if
every member is reachable, has a leader and is in sync, all supervisors have the same settings, and the supervisor's controller is
live; otherwise it is 1.`,
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
			if c := meta.FindStatusCondition(f.Status.Conditions, federationv1alpha1.ConditionGrantsOpen); c != nil && c.Status == metav1.ConditionTrue {
				if _, err := fmt.Fprintln(cmd.ErrOrStderr(), "note: "+c.Message); err != nil {
					return err
				}
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

// readFederation reads the Federation of a supervisor.
func readFederation(ctx context.Context, c client.Client, t target) (*federationv1alpha1.Federation, error) {
	f := &federationv1alpha1.Federation{}
	err := c.Get(ctx, client.ObjectKey{Name: federationv1alpha1.FederationName}, f)
	if isAbsent(err) {
		return nil, fmt.Errorf("the cluster of %s belongs to no federation; isthmusctl federation create or add makes it a member", t.source())
	}
	if err != nil {
		return nil, err
	}
	if len(f.Spec.Members) == 0 {
		return nil, fmt.Errorf("the cluster of %s is a child of federation %s and knows no members; give the context of a supervisor with --context", t.source(), f.Spec.ClusterSet)
	}
	return f, nil
}

// clockSkew is the tolerated difference between the clocks of two machines.
const clockSkew = time.Minute

// silence returns an error if no controller of the supervisor renews its Lease, so that the status is old. The second error
// is that of reading the Lease.
func silence(ctx context.Context, c client.Client, namespace string, now time.Time) (silent, err error) {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: namespace, Name: federationv1alpha1.ControllerLease}
	if err := c.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Lease %s of the supervisor's controller: %w", key, err)
	}
	const fix = "check that isthmus-controller runs with --federation; the status of members is old"
	if lease.Spec.RenewTime == nil || lease.Spec.LeaseDurationSeconds == nil {
		return fmt.Errorf("no controller of this supervisor has held Lease %s; %s", key, fix), nil
	}
	if at := lease.Spec.RenewTime.Time; now.Sub(at) > time.Duration(*lease.Spec.LeaseDurationSeconds)*time.Second+clockSkew {
		return fmt.Errorf("no controller of this supervisor has renewed Lease %s since %s; %s", key, at.UTC().Format(time.RFC3339), fix), nil
	}
	return nil, nil
}

// memberTable is the output of federation status.
type memberTable []federationv1alpha1.MemberStatus

// statusOf returns the status of every member, including members that the controller has not processed.
func statusOf(f *federationv1alpha1.Federation) memberTable {
	seen := map[string]federationv1alpha1.MemberStatus{}
	for _, m := range f.Status.Members {
		seen[m.ClusterID] = m
	}
	var all memberTable
	for _, m := range f.Spec.Members {
		s, ok := seen[m.ClusterID]
		if !ok {
			s = federationv1alpha1.MemberStatus{ClusterID: m.ClusterID, Message: "this supervisor's controller has not processed the member yet; check that isthmus-controller runs with --federation"}
		}
		all = append(all, s)
	}
	return all
}

// unready returns the faults of the members, or nil.
func (t memberTable) unready(f *federationv1alpha1.Federation) error {
	var errs []error
	if c := meta.FindStatusCondition(f.Status.Conditions, federationv1alpha1.ConditionReady); c != nil && c.Status == metav1.ConditionFalse {
		errs = append(errs, errors.New(c.Message))
	}
	if c := meta.FindStatusCondition(f.Status.Conditions, federationv1alpha1.ConditionSettingsDiffer); c != nil {
		errs = append(errs, errors.New(c.Message))
	}
	for _, m := range t {
		switch {
		case !m.Reachable && m.Message == "":
			errs = append(errs, fmt.Errorf("member %s is not reachable", m.ClusterID))
		case !m.Reachable:
			errs = append(errs, fmt.Errorf("member %s is not reachable: %s", m.ClusterID, m.Message))
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
