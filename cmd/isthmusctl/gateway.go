package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/certs"
)

func gatewayCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "gateway",
		Short:   "Set up gateways, show what they serve, and plan changes of them",
		Example: "  isthmusctl gateway certs --dir certs --gateway gw-1 --gateway gw-2\n  isthmusctl gateway show",
		Args:    usage.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(gatewayShowCommand(), gatewayExplainCommand(), certsCommand(), planCommand(), forgetCommand())
	return cmd
}

// certsConfig has the flags of gateway certs.
type certsConfig struct {
	dir, controller, format string
	gateways                []string
	life                    time.Duration
	renew                   bool
	step                    string
	secret, namespace       string
	gatewaysSecret          string
	authoritySecret         string
	target                  target
}

func certsCommand() *cobra.Command {
	var c certsConfig
	cmd := &cobra.Command{
		Use:   "certs",
		Short: "Issue and renew the certificates of gateways and their controller",
		Long: `Issue and renew the certificates with which gateways and their controller authenticate each other.

A folder contains them: one subfolder for each gateway, and one for the controller, with tls.crt, tls.key and ca.crt.
The key in authority.pem signs them; keep it safe. A later run issues missing certificates, renews those with less than
a third of their life left, and keeps the others. Programs pick up replaced files at once.

The authority itself is replaced in three steps; between them distribute the new files to every program.
--authority=begin creates the next authority and trusts it, use signs with it, and end removes the old one.

Gateways that are nodes of the cluster (the chart's gateway.enabled) read theirs from the Secret of --gateways-secret, as
NODE.crt and NODE.key: there a gateway's identity is the name of its node.

The controller renews the certificates in both Secrets itself if the Secret of --authority-secret has the authority's key (the
chart's gatewayController.authoritySecret). Whoever may read that Secret can impersonate every gateway.`,
		Example: `  # For two gateways, and the controller as a Secret in its cluster:
  isthmusctl gateway certs --dir certs --gateway gw-1 --gateway gw-2 --secret isthmus-gateway-certs

  # For two gateways that are nodes, with the chart's values gatewayController.certsSecret and gateway.certsSecret:
  isthmusctl gateway certs --dir certs --gateway node-1 --gateway node-2 \
      --secret isthmus-gateway-certs --gateways-secret isthmus-gateways

  # The same, and from now on the controller renews them:
  isthmusctl gateway certs --dir certs --secret isthmus-gateway-certs --gateways-secret isthmus-gateways \
      --authority-secret isthmus-gateway-authority

  # Once a month, for all of the folder:
  isthmusctl gateway certs --dir certs`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&c.dir, "dir", "", "folder of the certificates")
	f.StringArrayVar(&c.gateways, "gateway", nil, "identity of a gateway, as in its GatewayNode, repeatable")
	f.StringVar(&c.controller, "controller", certs.Controller, "identity of the controller")
	f.DurationVar(&c.life, "valid-for", 365*24*time.Hour, "how long a certificate is valid")
	f.BoolVar(&c.renew, "renew", false, "renew all certificates, even valid ones")
	f.StringVar(&c.step, "authority", "", "step of replacing the authority: begin, use or end")
	f.StringVar(&c.secret, "secret", "", "name of a Secret for the controller's certificate")
	f.StringVar(&c.gatewaysSecret, "gateways-secret", "", "name of a Secret for the certificates of all gateways that are nodes")
	f.StringVar(&c.authoritySecret, "authority-secret", "", "name of a Secret for the authority's certificate and key, so that the controller renews certificates")
	f.StringVarP(&c.namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace of those Secrets")
	f.StringVarP(&c.format, "output", "o", "text", "text or json")
	c.target.bind(f)
	c.target.bindTimeout(f)
	return cmd
}

func (c *certsConfig) run(cmd *cobra.Command) error {
	if err := tables.CheckFormat(c.format); err != nil {
		return err
	}
	switch {
	case c.dir == "":
		return errors.New("no --dir; give the folder for the certificates")
	case c.life <= 0:
		return fmt.Errorf("--valid-for=%s is not positive", c.life)
	}
	folder := certs.Folder{Path: c.dir}
	done, err := folder.Update(certs.Order{
		Identities: append(c.gateways, c.controller), Life: c.life, Renew: c.renew, Step: certs.Step(c.step),
	}, time.Now())
	if err != nil {
		return err
	}
	for _, to := range []struct {
		secret string
		data   func(certs.Folder) (map[string][]byte, error)
		kind   corev1.SecretType
	}{
		{c.secret, c.ofController, corev1.SecretTypeTLS},
		{c.gatewaysSecret, c.ofGateways, corev1.SecretTypeOpaque},
		{c.authoritySecret, ofAuthority, corev1.SecretTypeTLS},
	} {
		if to.secret == "" {
			continue
		}
		data, err := to.data(folder)
		if err != nil {
			return err
		}
		if err := c.store(cmd.Context(), to.secret, to.kind, data); err != nil {
			return err
		}
	}
	return tables.Write(cmd.OutOrStdout(), certTable(done), c.format)
}

// caKey is the key of the trusted authorities in both Secrets.
const caKey = "ca.crt"

// ofController returns the controller's files, by the keys of its Secret.
func (c *certsConfig) ofController(f certs.Folder) (map[string][]byte, error) {
	files := f.Files(c.controller)
	return readAll(map[string]string{corev1.TLSCertKey: files.Cert, corev1.TLSPrivateKeyKey: files.Key, caKey: files.CA})
}

// ofAuthority returns the authority that signs, by the keys of its Secret.
func ofAuthority(f certs.Folder) (map[string][]byte, error) {
	a, err := f.Signer(time.Now())
	if err != nil {
		return nil, err
	}
	return map[string][]byte{corev1.TLSCertKey: a.Cert, corev1.TLSPrivateKeyKey: a.Key}, nil
}

// readAll reads files.
func readAll(paths map[string]string) (map[string][]byte, error) {
	data := map[string][]byte{}
	for key, path := range paths {
		var err error
		if data[key], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return data, nil
}

// ofGateways returns the files of all gateways, by the keys of the Secret that the chart's gateways mount.
func (c *certsConfig) ofGateways(f certs.Folder) (map[string][]byte, error) {
	all, err := f.Identities()
	if err != nil {
		return nil, err
	}
	files := map[string]string{caKey: f.Files(c.controller).CA}
	for _, identity := range all {
		if identity == c.controller {
			continue
		}
		of := f.Files(identity)
		files[identity+".crt"], files[identity+".key"] = of.Cert, of.Key
	}
	return readAll(files)
}

// store writes data into a Secret, and removes its other keys.
func (c *certsConfig) store(ctx context.Context, name string, kind corev1.SecretType, data map[string][]byte) error {
	api, err := c.target.connect()
	if err != nil {
		return err
	}
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name}}
	_, err = controllerutil.CreateOrUpdate(ctx, api, s, func() error {
		if s.UID == "" {
			s.Type = kind
		}
		s.Data = data
		return nil
	})
	if err != nil {
		return fmt.Errorf("write Secret %s: %w", client.ObjectKeyFromObject(s), err)
	}
	return nil
}

// certTable is the output of gateway certs.
type certTable []certs.Issued

// Header is part of tables.Table.
func (certTable) Header() []string { return []string{"IDENTITY", "VALID UNTIL", "CERTIFICATE"} }

// Rows is part of tables.Table.
func (t certTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, d := range t {
		rows[i] = []string{d.Identity, d.Until.Format(time.DateTime), d.Files.Cert}
	}
	return rows
}

// Nothing is part of tables.Table.
func (certTable) Nothing() string { return "all certificates are valid" }
