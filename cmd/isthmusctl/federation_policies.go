package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/policies"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// policiesConfig has the flags of federation policies.
type policiesConfig struct {
	target                  target
	namespace, file, format string
	dryRun                  bool
}

func federationPoliciesCommand() *cobra.Command {
	var c policiesConfig
	cmd := &cobra.Command{
		Use:   "policies",
		Short: "Show the state of federated policies in each member",
		Long: `Show the state of federated policies in each member: applied, drift (the copy was edited and has been reverted), pending,
kind missing, namespace missing, refused by the member, taken (a foreign object has the name), or unreachable. The
command reads the members with the tokens of the given supervisor.

With --dry-run it shows the changes that leaders would make, field by field. With --file it shows those after applying
the objects in FILE to the cluster of the context, which validates them. It writes nothing.`,
		Example: `  isthmusctl federation policies --context ctx-a
  isthmusctl federation policies --context ctx-a --dry-run --file policy.yaml -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd) },
	}
	f := cmd.Flags()
	c.target.bind(f)
	c.target.bindTimeout(f)
	f.StringVarP(&c.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.BoolVar(&c.dryRun, "dry-run", false, "show the changes that leaders would make")
	f.StringVarP(&c.file, "file", "f", "", "with --dry-run, policies to apply, in YAML")
	f.StringVarP(&c.format, "output", "o", "text", "text or json")
	return cmd
}

func (c *policiesConfig) run(cmd *cobra.Command) error {
	if err := tables.CheckFormat(c.format); err != nil {
		return err
	}
	if c.file != "" && !c.dryRun {
		return errors.New("--file applies nothing; give --dry-run with it to see the changes, or use kubectl apply")
	}
	ctx := cmd.Context()
	supervisor, err := c.target.connect()
	if err != nil {
		return err
	}
	f, err := readFederation(ctx, supervisor, c.target)
	if err != nil {
		return err
	}
	proposals, err := c.proposals(ctx, supervisor)
	if err != nil {
		return err
	}
	members, away, err := c.members(ctx, supervisor, f)
	if err != nil {
		return err
	}
	config := policies.Config{Kinds: policies.Kinds(f.Spec.Policies), Namespace: c.namespace, Grants: grants.New(f.Spec)}
	for _, p := range proposals {
		if !config.Travels(p.Object) {
			return fmt.Errorf("%s: %s is not a kind that the Federation replicates, or it lacks the annotation %s: \"true\"; see spec.policies.kinds of the Federation",
				c.file, p.Object.GroupVersionKind(), federationv1alpha1.AnnotationPolicy)
		}
	}
	found, err := policies.Preview(ctx, config, members, proposals)
	if err != nil {
		return err
	}
	if err := printNotes(cmd, away...); err != nil {
		return err
	}
	if !c.dryRun {
		return tables.Write(cmd.OutOrStdout(), outcomeTable(found), c.format)
	}
	changes := changeTable{}
	for _, o := range found {
		if o.Action != "leave" {
			changes = append(changes, o)
		}
	}
	return tables.Write(cmd.OutOrStdout(), changes, c.format)
}

// members returns all members, read with the supervisor's tokens, and a note for each that is away.
func (c *policiesConfig) members(ctx context.Context, supervisor client.Client, f *federationv1alpha1.Federation) (all []reconcile.Member, away []string, err error) {
	for _, m := range f.Spec.Members {
		secret := &corev1.Secret{}
		key := client.ObjectKey{Namespace: federationv1alpha1.SecretNamespace, Name: m.Secret}
		err := supervisor.Get(ctx, key, secret)
		if apierrors.IsNotFound(err) {
			away = append(away, fmt.Sprintf("member %s: Secret %s, with the token for it, does not exist; run isthmusctl federation create again", m.ClusterID, key))
			all = append(all, policies.Live(clusterset.ClusterID(m.ClusterID), supervisor, true))
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read Secret %s, with the token for member %s: %w", key, m.ClusterID, err)
		}
		cfg := &rest.Config{
			Host: m.Server, BearerToken: string(secret.Data[federationv1alpha1.SecretToken]),
			TLSClientConfig: rest.TLSClientConfig{CAData: secret.Data[federationv1alpha1.SecretCA]},
		}
		prepare(cfg, origin{
			address: "Federation " + f.Name, credentials: "Secret " + key.String(), fix: "run isthmusctl federation create again",
		}, c.target.timeout)
		member, err := connect(cfg)
		if err == nil {
			err = member.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &corev1.Namespace{})
		}
		if err != nil {
			away = append(away, fmt.Sprintf("member %s: %s", m.ClusterID, sentence(err)))
		}
		all = append(all, policies.Live(clusterset.ClusterID(m.ClusterID), member, err != nil))
	}
	return all, away, nil
}

// proposals reads the file, and completes its objects by a dry run on the supervisor's API server.
func (c *policiesConfig) proposals(ctx context.Context, supervisor client.Client) ([]policies.Proposal, error) {
	if c.file == "" {
		return nil, nil
	}
	text, err := os.ReadFile(c.file)
	if err != nil {
		return nil, err
	}
	claim := &federationv1alpha1.ClusterClaim{}
	if err := supervisor.Get(ctx, client.ObjectKey{Name: strings.ToLower(federationv1alpha1.ClaimID)}, claim); err != nil {
		return nil, fmt.Errorf("read the id of the cluster of %s: %w", c.target.source(), err)
	}
	var all []policies.Proposal
	for doc := range strings.SplitSeq(string(text), "\n---") {
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(doc), &o.Object); err != nil {
			return nil, fmt.Errorf("%s: %w", c.file, err)
		}
		if len(o.Object) == 0 {
			continue
		}
		if err := tryOut(ctx, supervisor, o); err != nil {
			return nil, fmt.Errorf("%s: apply %s %s: %w", c.file, o.GetKind(), o.GetName(), err)
		}
		all = append(all, policies.Proposal{Member: clusterset.ClusterID(claim.Spec.Value), Object: o})
	}
	return all, nil
}

// tryOut replaces o by the object that an API server would store, by a dry run.
func tryOut(ctx context.Context, c client.Client, o *unstructured.Unstructured) error {
	have := o.DeepCopy()
	err := c.Get(ctx, client.ObjectKeyFromObject(o), have)
	if apierrors.IsNotFound(err) {
		err = c.Create(ctx, o, client.DryRunAll)
		o.SetCreationTimestamp(metav1.NewTime(time.Now().Truncate(time.Second)))
		return err
	}
	if err != nil {
		return err
	}
	o.SetResourceVersion(have.GetResourceVersion())
	return c.Update(ctx, o, client.DryRunAll)
}

// outcomeTable is the output of federation policies.
type outcomeTable []policies.Outcome

// MarshalJSON encodes t as a list, never null.
func (t outcomeTable) MarshalJSON() ([]byte, error) {
	return json.Marshal(append([]policies.Outcome{}, t...))
}

// Header is part of tables.Table.
func (outcomeTable) Header() []string {
	return []string{"POLICY", "ORIGIN", "MEMBER", "STATE", "MESSAGE"}
}

// Rows is part of tables.Table.
func (t outcomeTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, o := range t {
		rows[i] = []string{policyName(o), string(o.Origin), string(o.Member), string(o.State), o.Message}
	}
	return rows
}

// Nothing is part of tables.Table.
func (outcomeTable) Nothing() string { return "no policy is federated" }

// policyName names a policy as kubectl does.
func policyName(o policies.Outcome) string {
	kind, _, _ := strings.Cut(o.Kind, ".")
	if o.Namespace == "" {
		return kind + "/" + o.Name
	}
	return kind + "/" + o.Namespace + "/" + o.Name
}

// changeTable is the output of federation policies --dry-run: one row per field.
type changeTable []policies.Outcome

// Header is part of tables.Table.
func (changeTable) Header() []string {
	return []string{"POLICY", "MEMBER", "ACTION", "FIELD", "HAS", "GETS"}
}

// Rows is part of tables.Table.
func (t changeTable) Rows() [][]string {
	var rows [][]string
	for _, o := range t {
		for _, d := range o.Differences {
			rows = append(rows, []string{policyName(o), string(o.Member), o.Action, d.Path, jsonText(d.Have), jsonText(d.Want)})
		}
	}
	return rows
}

// Nothing is part of tables.Table.
func (changeTable) Nothing() string { return "leaders would change nothing" }

func jsonText(v any) string {
	if v == nil {
		return ""
	}
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(text)
}
