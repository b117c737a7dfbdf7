// Package usage says what is wrong with a command line: one sentence that names the word and where to read
// what is right.
package usage

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// Explain makes errors about flags, of root and of all its commands, name the command's help.
func Explain(root *cobra.Command) {
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
}

// NoArgs refuses arguments (see [cobra.PositionalArgs]). Where there are subcommands, an argument is a
// misspelt one.
func NoArgs(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case !cmd.HasSubCommands():
		return fmt.Errorf("%s takes no argument, it got %q; see %s --help", cmd.Name(), args[0], cmd.CommandPath())
	}
	cmd.SuggestionsMinimumDistance = 2 // cobra's default, which it sets only for errors of its own
	meant := ""
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		meant = ", did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("%q is no command%s; see %s --help", args[0], meant, cmd.CommandPath())
}
