package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/membership"
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

The broker runs nothing of Isthmus: it is one namespace with a few definitions. A second run keeps all
settings that no flag names, and writes a fresh file; the one before stays valid until it expires.`,
		Example: `  isthmusctl deploy-broker --kubeconfig broker.kubeconfig -o broker-info.yaml
  isthmusctl deploy-broker --kubeconfig broker.kubeconfig --clusterset-ip-cidr-range 243.0.0.0/8,fd00:10::/48`,
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
	f.BoolVar(&enabled, "enable-clusterset-ip", true, "give exported Services a ClusterSetIP without being asked")
	f.StringSliceVar(&ranges, "clusterset-ip-cidr-range", nil,
		"ranges of ClusterSetIPs, one a family (default: as they are, at first 243.0.0.0/8 and a random /48)")
	f.StringVar(&b.Server, "broker-server", "", "URL at which members reach the broker (default: that of the kubeconfig)")
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
	info, config, err := membership.DeployBroker(cmd.Context(), c, b)
	if err != nil {
		return err
	}
	if err := info.Write(output); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `broker of ClusterSet %s stands at %s, namespace %s
ClusterSetIPs come from %s, given %s
wrote %s, valid until %s; keep it secret
next: %s join %s --clusterid ID --kubeconfig FILE
`,
		info.ClusterSetID, info.Server, info.Namespace,
		strings.Join(config.Spec.ClusterSetIPCIDRRange, " and "), map[bool]string{true: "without asking", false: "on request"}[config.Spec.ClusterSetIPEnabled],
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
