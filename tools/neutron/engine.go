package neutron

import (
	"context"
	_ "embed"
	"fmt"
	"os"
)

//go:embed serving.py
var serving string

// The services of an engine. The first two are servers of databases. Neutron's client of the northbound one fails if that server
// has the southbound one, too (neutron 21, handle_db_schema_changes).
const (
	wanted     Service = "ovsdb-northbound"
	actual     Service = "ovsdb-southbound" // and Open vSwitch's
	vswitch    Service = "ovs-vswitchd"
	northd     Service = "ovn-northd"
	controller Service = "ovn-controller"
)

// engine lists the services of an engine in the order of their start.
var engine = []Service{wanted, actual, vswitch, northd, controller}

// northbound is the database of what Neutron wants.
const northbound = "northbound.ovs"

// engineDatabases are the schemas of the three databases. The southbound one follows from the northbound one.
var engineDatabases = map[string]string{
	northbound:       "/usr/share/ovn/ovn-nb.ovsschema",
	"southbound.ovs": "/usr/share/ovn/ovn-sb.ovsschema",
	"switch.ovs":     "/usr/share/openvswitch/vswitch.ovsschema",
}

// socket returns the address of a server of databases.
func (c *Cloud) socket(s Service) string { return "unix:" + c.path(string(s)+".sock") }

// engineEnvironment makes Open vSwitch and OVN keep all files in the cloud's folder.
func (c *Cloud) engineEnvironment() (all []string) {
	if !c.cfg.Engine {
		return nil
	}
	for _, of := range []string{"OVS", "OVN"} {
		for _, dir := range []string{"RUNDIR", "LOGDIR", "DBDIR"} {
			all = append(all, fmt.Sprintf("%s_%s=%s", of, dir, c.cfg.Dir))
		}
	}
	return all
}

// makeEngine creates the databases that do not exist. The northbound one may be a copy of the template's.
func (c *Cloud) makeEngine(ctx context.Context) error {
	for file, schema := range engineDatabases {
		if c.exists(file) {
			continue
		}
		if err := c.run(ctx, "ovsdb-tool", "create", c.path(file), schema); err != nil {
			return err
		}
	}
	return nil
}

// startEngine starts the services of the engine that do not run.
func (c *Cloud) startEngine(ctx context.Context) error {
	if err := c.makeEngine(ctx); err != nil {
		return err
	}
	for _, s := range engine {
		if err := c.Start(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// engineArguments returns the command line of a service of the engine, and a command that succeeds when the service answers.
func (c *Cloud) engineArguments(s Service) (argv, answers []string) {
	north, south, control := c.socket(wanted), c.socket(actual), "--unixctl="+c.path(string(s)+".ctl")
	switch s {
	case wanted:
		return []string{"ovsdb-server", control, "--remote=p" + north, c.path(northbound)}, []string{"ovn-nbctl", "--db=" + north, "--timeout=3", "init"}
	case actual:
		return []string{"ovsdb-server", control, "--remote=p" + south, c.path("southbound.ovs"), c.path("switch.ovs")},
			[]string{"ovs-vsctl", "--db=" + south, "--timeout=3", "--no-wait", "init"}
	case vswitch: // it has taken the configuration when the command succeeds
		return []string{string(s), control, south}, []string{
			"ovs-vsctl", "--db=" + south, "--timeout=3", "set", "Open_vSwitch", ".", "external_ids:system-id=" + Host,
			"external_ids:hostname=" + Host, "external_ids:ovn-remote=" + south, "external_ids:ovn-encap-type=geneve",
			"external_ids:ovn-encap-ip=" + c.cfg.Addr.String(), "external_ids:ovn-bridge-datapath-type=netdev",
		}
	case northd:
		return []string{string(s), control, "--ovnnb-db=" + north, "--ovnsb-db=" + south}, []string{"ovn-nbctl", "--db=" + north, "--timeout=3", "--wait=sb", "sync"}
	default:
		return []string{string(s), south}, []string{"ovn-sbctl", "--db=" + south, "--timeout=3", "get", "Chassis", Host, "hostname"}
	}
}

// Plug connects a port of Neutron, bound to Host, to a device in the services' network namespace.
func (c *Cloud) Plug(ctx context.Context, port, device string) error {
	return c.run(ctx, "ovs-vsctl", "--db="+c.socket(actual), "--timeout=30", "add-port", "br-int", device,
		"--", "set", "Interface", device, "external_ids:iface-id="+port)
}

// Settle returns when packets are judged by what Neutron has answered before.
func (c *Cloud) Settle(ctx context.Context) error {
	return c.run(ctx, "ovn-nbctl", "--db="+c.socket(wanted), "--timeout=60", "--wait=hv", "sync")
}

// backupEngine writes a copy of the northbound database. The others follow from it.
func (c *Cloud) backupEngine(ctx context.Context, to string) error {
	copied, err := c.command(ctx, "ovsdb-client", "backup", c.socket(wanted), "OVN_Northbound").Output()
	if err != nil {
		return fmt.Errorf("back the northbound database up: %w", err)
	}
	return os.WriteFile(to, copied, 0o600)
}
