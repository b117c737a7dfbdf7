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
		Long: `Make a cluster the broker of a ClusterSet. Then isthmusctl invite writes a file for each cluster that joins it.

The broker is a namespace with a few CRDs, and with admission policies that restrict each member to its own
objects. It needs no program of Isthmus. A quota controller, which is optional, bounds what each member stores
there: give --quota-controller where the broker's cluster can run pods, or run isthmus-controller
--quota-controller elsewhere with a token of ServiceAccount isthmus-quota-controller.

With --admit-any-cluster it also writes a file with which any new cluster joins, whatever its id. The holder of that
file can add --admit-at-most clusters, but cannot change present members or read Secrets. A run without the flag ends such
files.

A second run keeps all settings that no flag names. Members apply changed settings when they join again.`,
		Example: `  isthmusctl deploy-broker --kubeconfig broker.kubeconfig
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --admit-any-cluster -o broker-info.yaml
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --clusterset-ip-cidr-range 243.0.0.0/8,fd00:10::/48
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --profile lighthouse
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --quota-controller registry.example.org/team/isthmus/controller:v0.1.0 --image-pull-secrets pull`,
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
			for _, flag := range []string{"output", "valid-for", "admit-at-most"} {
				if cmd.Flags().Changed(flag) && !b.AdmitAnyCluster {
					return fmt.Errorf("--%s requires --admit-any-cluster, which writes a file for clusters of any id; isthmusctl invite ID writes one for a single cluster", flag)
				}
			}
			if err := checkPullSecrets(b.PullSecrets, "quota-controller", b.QuotaController); err != nil {
				return err
			}
			return deployBroker(cmd, t, b, output)
		},
	}
	t.bind(cmd.Flags())
	t.bindTimeout(cmd.Flags())
	f := cmd.Flags()
	f.BoolVar(&enabled, "enable-clusterset-ip", true, "give exported Services a ClusterSetIP by default (default: the present value, initially that of the profile: true for kep, false for lighthouse)")
	f.Lookup("enable-clusterset-ip").DefValue = "" // the text has it
	f.StringSliceVar(&ranges, "clusterset-ip-cidr-range", nil,
		"ranges of ClusterSetIPs, one per family (default: the present ones, initially 243.0.0.0/8 and a random /48)")
	f.StringVarP(&output, "output", "o", "broker-info.yaml", "path of the file of --admit-any-cluster, readable by its owner only")
	bindBrokerSettings(f, &b)
	return cmd
}

// bindBrokerSettings binds the flags of a broker that need no further parsing.
func bindBrokerSettings(f *pflag.FlagSet, b *membership.Broker) {
	f.StringVar(&b.Namespace, "broker-namespace", v1alpha1.DefaultBrokerNamespace, "namespace that becomes the broker")
	f.StringVar(&b.ClusterSetID, "clusterset-id", "", "name of the ClusterSet (default: the present one, initially \"clusterset\")")
	f.StringVar(&b.Server, "broker-server", "", "URL at which members reach the broker (default: that of the kubeconfig)")
	f.Int64Var(&b.ClusterSize, "clusterset-ip-cluster-size", 0,
		"default number of addresses of a member's IPv4 block, rounded up to a power of two (default: the present value, initially 65536)")
	choice(f, &b.Settings.Profile, "profile", "profile with the defaults of the settings below (default: the present one, initially kep)", v1alpha1.ProfileKEP, v1alpha1.ProfileLighthouse)
	choice(f, &b.Settings.PortMerge, "port-merge", "ports of an import whose exporters differ", v1alpha1.PortMergeUnion, v1alpha1.PortMergeIntersection)
	choice(f, &b.Settings.TypeConflict, "type-conflict", "treatment of exporters whose type differs from the import's", v1alpha1.TypeConflictMerge, v1alpha1.TypeConflictExclude)
	choice(f, &b.Settings.Endpoints, "endpoints", "endpoints that members export, those of pods or of the Service", v1alpha1.EndpointsPods, v1alpha1.EndpointsServiceVIP)
	choice(f, &b.Settings.ConflictPrecedence, "conflict-precedence", "time by which the oldest export is determined", v1alpha1.PrecedenceExportTime, v1alpha1.PrecedenceBrokerTime)
	f.StringVar(&b.QuotaController, "quota-controller", "", "image of isthmus-controller with which the broker's cluster runs the quota controller; none removes it (default: what is deployed stays)")
	bindPullSecrets(f, &b.PullSecrets)
	f.DurationVar(&b.CredentialLifetime, "credential-lifetime", 0, "lifetime of members' credentials, which their controllers renew when half of it has passed (default: the present value, initially 168h)")
	f.Lookup("credential-lifetime").DefValue = "" // the text has it
	f.BoolVar(&b.AdmitAnyCluster, "admit-any-cluster", false, "write a file with which any new cluster joins; without it such files end")
	f.Int64Var(&b.AdmitAtMost, "admit-at-most", 10, "how many clusters that file admits")
	f.DurationVar(&b.TokenTTL, "valid-for", 24*time.Hour, "lifetime of that file")
}

// bindPullSecrets binds the flag with the Secrets for an image on the broker.
func bindPullSecrets(f *pflag.FlagSet, names *[]string) {
	f.StringSliceVar(names, "image-pull-secrets", nil, "Secrets in the broker's namespace with the registry's credentials for that image; an empty value removes them (default: the present ones)")
}

// checkPullSecrets refuses Secrets for an image without that image, which a flag names.
func checkPullSecrets(names []string, flag, image string) error {
	if names != nil && (image == "" || image == membership.NoQuotaController) {
		return fmt.Errorf("--image-pull-secrets requires --%s IMAGE, which is pulled with them", flag)
	}
	return nil
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
	if b.AdmitAnyCluster {
		if err := info.Write(output); err != nil {
			return err
		}
	}
	if err := printNotes(cmd, d.Notes...); err != nil {
		return err
	}
	name := cmd.Root().DisplayName()
	next := fmt.Sprintf("next: %s invite ID --kubeconfig FILE, for each cluster that joins\n", name)
	if b.AdmitAnyCluster {
		next = fmt.Sprintf("wrote %s, valid until %s; keep it secret, because it admits any new cluster\nnext: %s join %s --clusterid ID --kubeconfig FILE\n",
			output, info.Expires.Format(time.RFC3339), name, output)
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `the broker of ClusterSet %s is %s, namespace %s
ClusterSetIPs come from %s, allocated %s
%s`,
		info.ClusterSetID, info.Server, info.Namespace,
		strings.Join(config.Spec.ClusterSetIPCIDRRange, " and "), allocationMode(config.Spec.ClusterSetIPEnabled), next)
	return err
}

// authority returns the certificate authority (PEM) of cfg's server, or none for those of the system.
func authority(cfg *rest.Config) ([]byte, error) {
	if cfg.Insecure {
		return nil, errors.New("it skips the verification of the server's certificate; add certificate-authority to it, because members need it")
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

// choice binds a flag with one of a few values, or none.
func choice(f *pflag.FlagSet, value *string, name, usage string, values ...string) {
	f.Var(&oneOf{value, values}, name, usage+": "+strings.Join(values, " or "))
}

// oneOf is the value of a flag of choice.
type oneOf struct {
	value  *string
	values []string
}

// Set sets one of the values.
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

// Type names a value in the help.
func (o *oneOf) Type() string { return "choice" }

// printNotes prints notes for the administrator.
func printNotes(cmd *cobra.Command, notes ...string) error {
	for _, note := range notes {
		if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "note: %s\n", note); err != nil {
			return err
		}
	}
	return nil
}
