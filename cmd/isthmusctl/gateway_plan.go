package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/gateway/controller"
	"github.com/isthmus-net/isthmus/gateway/service"
)

// planConfig has the flags of gateway plan.
type planConfig struct {
	settings, format string
	agree            bool
	target           target
}

func planCommand() *cobra.Command {
	var c planConfig
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what edited settings of the gateway controller would take from Services",
		Long: `Show what edited settings of the gateway controller would take from Services.

An edit alone takes nothing: a Service keeps its address, its floating IP and its gateways until it agrees. --agree agrees
for all Services that the plan shows, by an annotation on each, which is valid for this change alone. Run it before or after
the controller has the settings.`,
		Example: `  isthmusctl gateway plan --settings settings.yaml
  isthmusctl gateway plan --settings settings.yaml --agree`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&c.settings, "settings", "", "file with the settings of isthmus-gateway-controller")
	f.BoolVar(&c.agree, "agree", false, "agree to the plan: annotate the Services that it shows")
	f.StringVarP(&c.format, "output", "o", "text", "text or json")
	c.target.bind(f)
	c.target.bindTimeout(f)
	return cmd
}

func (c *planConfig) run(cmd *cobra.Command) error {
	if err := tables.CheckFormat(c.format); err != nil {
		return err
	}
	if c.settings == "" {
		return errors.New("no --settings; give the file with the edited settings of isthmus-gateway-controller")
	}
	settings, err := readSettings(c.settings)
	if err != nil {
		return err
	}
	api, err := c.target.connect()
	if err != nil {
		return err
	}
	var services corev1.ServiceList
	if err := api.List(cmd.Context(), &services); err != nil {
		return fmt.Errorf("list services: %w", err)
	}
	edits := controller.Edits(settings, services.Items)
	slices.SortFunc(edits, func(a, b controller.Edit) int {
		return strings.Compare(a.Namespace+"/"+a.Service, b.Namespace+"/"+b.Service)
	})
	for i := range edits {
		if c.agree && !edits[i].Agreed {
			if err := agree(cmd.Context(), api, services.Items, &edits[i]); err != nil {
				return err
			}
		}
	}
	return tables.Write(cmd.OutOrStdout(), editTable(edits), c.format)
}

// readSettings reads the settings of the gateway controller from the file of --settings.
func readSettings(path string) (*controller.Settings, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read --settings: %w", err)
	}
	s, err := parseSettings(text)
	if err != nil {
		return nil, fmt.Errorf("--settings=%s: %w", path, err)
	}
	return s, nil
}

func parseSettings(text []byte) (*controller.Settings, error) {
	s := &controller.Settings{}
	return s, errors.Join(yaml.UnmarshalStrict(text, s), s.Complete())
}

// agree annotates the Service of an edit.
func agree(ctx context.Context, api client.Client, services []corev1.Service, e *controller.Edit) error {
	i := slices.IndexFunc(services, func(s corev1.Service) bool { return s.Namespace == e.Namespace && s.Name == e.Service })
	s := services[i].DeepCopy()
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[service.AnnotationAgree] = e.Agreement
	if err := api.Patch(ctx, s, client.MergeFrom(&services[i])); err != nil {
		return fmt.Errorf("annotate service %s/%s: %w", e.Namespace, e.Service, err)
	}
	e.Agreed = true
	return nil
}

// editTable is the output of gateway plan.
type editTable []controller.Edit

// Header is part of tables.Table.
func (editTable) Header() []string {
	return []string{"SERVICE", "ADDRESSES", "CHANGE", "AGREED"}
}

// Rows is part of tables.Table.
func (t editTable) Rows() [][]string {
	rows := make([][]string, len(t))
	for i, e := range t {
		addresses := make([]string, len(e.Addresses))
		for i, a := range e.Addresses {
			addresses[i] = a.String()
		}
		agreed := "no"
		if e.Agreed {
			agreed = "yes"
		}
		rows[i] = []string{e.Namespace + "/" + e.Service, strings.Join(addresses, ","), e.Change, agreed}
	}
	return rows
}

// Nothing is part of tables.Table.
func (editTable) Nothing() string { return "these settings take nothing from any Service" }
