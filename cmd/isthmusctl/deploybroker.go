package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
)

func deployBrokerCommand() *cobra.Command {
	var t target
	var ranges []string
	var enabled bool
	var output string
	b := membership.Broker{}
	cmd := &cobra.Command{
		Use:   "deploy-broker",
		Short: "Make a cluster the broker of a ClusterSet",
		Long: `Make a cluster the broker of a ClusterSet, and write the file with which clusters join it.

The broker runs nothing of Isthmus: it is one namespace with a few definitions, and admission policies that
keep each member to its own objects. A second run keeps all settings that no flag names, and writes a fresh
file; the one before stays valid until it expires. Members take changed settings over when they join again.`,
		Example: `  isthmusctl deploy-broker --kubeconfig broker.kubeconfig -o broker-info.yaml
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --clusterset-ip-cidr-range 243.0.0.0/8,fd00:10::/48
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --profile lighthouse`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if b.Ranges, err = membership.ParseCIDRs(ranges); err != nil {
				return fmt.Errorf("--clusterset-ip-cidr-range: %w", err)
			}
			if cmd.Flags().Changed("enable-clusterset-ip") {
				b.ClusterSetIPEnabled = &enabled
			}
			if err := checkURL("broker-server", b.Server); err != nil {
				return err
			}
			return deployBroker(cmd, t, b, output)
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	f.StringVar(&b.Namespace, "broker-namespace", v1alpha1.DefaultBrokerNamespace, "namespace that becomes the broker")
	f.StringVar(&b.ClusterSetID, "clusterset-id", "", "name of the ClusterSet (default: as it is, at first \"clusterset\")")
	f.BoolVar(&enabled, "enable-clusterset-ip", true, "give exported Services a ClusterSetIP without being asked (default: as it is, at first that of the profile: true for kep, false for lighthouse)")
	f.Lookup("enable-clusterset-ip").DefValue = "" // it stands in the text
	f.StringSliceVar(&ranges, "clusterset-ip-cidr-range", nil,
		"ranges of ClusterSetIPs, one a family (default: as they are, at first 243.0.0.0/8 and a random /48)")
	f.StringVar(&b.Server, "broker-server", "", "URL at which members reach the broker (default: that of the kubeconfig)")
	f.Int64Var(&b.ClusterSize, "clusterset-ip-cluster-size", 0,
		"addresses in the IPv4 block of a member that asks for none, rounded up to a power of two (default: as it is, at first 65536)")
	choice(f, &b.Settings.Profile, "profile", "what all other settings mean by default (default: as it is, at first kep)", v1alpha1.ProfileKEP, v1alpha1.ProfileLighthouse)
	choice(f, &b.Settings.PortMerge, "port-merge", "ports of an import, of those its exporters have", v1alpha1.PortMergeUnion, v1alpha1.PortMergeIntersection)
	choice(f, &b.Settings.TypeConflict, "type-conflict", "what becomes of exporters of another type than the import's", v1alpha1.TypeConflictMerge, v1alpha1.TypeConflictExclude)
	choice(f, &b.Settings.Endpoints, "endpoints", "what members export, addresses of pods or of the Service", v1alpha1.EndpointsPods, v1alpha1.EndpointsServiceVIP)
	choice(f, &b.Settings.ConflictPrecedence, "conflict-precedence", "by which time an export is the oldest", v1alpha1.PrecedenceExportTime, v1alpha1.PrecedenceBrokerTime)
	f.DurationVar(&b.TokenTTL, "valid-for", 24*time.Hour, "how long clusters may join with the file")
	f.StringVarP(&output, "output", "o", "broker-info.yaml", "file to write, readable by its owner alone")
	return cmd
}

func deployBroker(cmd *cobra.Command, t target, b membership.Broker, output string) error {
	cfg, _, err := t.config()
	if err != nil {
		return err
	}
	if b.CA, err = authority(cfg); err != nil {
		return fmt.Errorf("%s: %w", t.source(), err)
	}
	if b.Server == "" {
		b.Server = cfg.Host
	}
	b.Server = strings.TrimSuffix(b.Server, "/")
	c, err := connect(cfg)
	if err != nil {
		return err
	}
	d, err := membership.DeployBroker(cmd.Context(), c, b)
	if err != nil {
		return err
	}
	info, config := d.Info, d.Config
	if err := info.Write(output); err != nil {
		return err
	}
	if err := tell(cmd, d.Notes...); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `broker of ClusterSet %s stands at %s, namespace %s
ClusterSetIPs come from %s, given %s
wrote %s, valid until %s; keep it secret
next: %s join %s --clusterid ID --kubeconfig FILE
`,
		info.ClusterSetID, info.Server, info.Namespace,
		strings.Join(config.Spec.ClusterSetIPCIDRRange, " and "), givenHow(config.Spec.ClusterSetIPEnabled),
		output, info.Expires.Format(time.RFC3339), cmd.Root().DisplayName(), output)
	return err
}

// authority returns the certificates (PEM) by which cfg's server is known, or none when the system's do.
func authority(cfg *rest.Config) ([]byte, error) {
	if cfg.Insecure {
		return nil, errors.New("it skips the check of the server's certificate; members cannot trust such a broker, put certificate-authority into it")
	}
	if len(cfg.CAData) > 0 || cfg.CAFile == "" {
		return cfg.CAData, nil
	}
	pem, err := os.ReadFile(cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("read certificate-authority: %w", err)
	}
	return pem, nil
}

// choice binds a flag that has one of a few values, or none.
func choice(f *pflag.FlagSet, value *string, name, usage string, values ...string) {
	f.Var(&oneOf{value, values}, name, usage+": "+strings.Join(values, " or "))
}

// oneOf is the value of such a flag.
type oneOf struct {
	value  *string
	values []string
}

// Set takes one of the values.
func (o *oneOf) Set(text string) error {
	if !slices.Contains(o.values, text) {
		return fmt.Errorf("use %s", strings.Join(o.values, " or "))
	}
	*o.value = text
	return nil
}

// String returns the value.
func (o *oneOf) String() string {
	if o.value == nil {
		return ""
	}
	return *o.value
}

// Type is what the help calls a value.
func (o *oneOf) Type() string { return "choice" }

// tell prints what a person should know beside what they asked for.
func tell(cmd *cobra.Command, notes ...string) error {
	for _, note := range notes {
		if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "note: %s\n", note); err != nil {
			return err
		}
	}
	return nil
}
