// Package usage makes the errors of a wrong command line: one sentence that quotes the wrong word and names the command's
// help.
package usage

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Explain adds the command's help to errors about flags of root and of all its subcommands.
func Explain(root *cobra.Command) {
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
}

// NoArgs rejects arguments (see [cobra.PositionalArgs]). If cmd has subcommands, it takes the argument for a misspelt one
// and suggests the nearest.
func NoArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case !cmd.HasSubCommands():
		return fmt.Errorf("%s takes no arguments, got %q; see %s --help", cmd.Name(), args[0], cmd.CommandPath())
	}
	cmd.SuggestionsMinimumDistance = 2 // cobra's default, which it sets only before its own errors
	suggestion := ""
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		suggestion = ", did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("%q is not a command%s; see %s --help", args[0], suggestion, cmd.CommandPath())
}
