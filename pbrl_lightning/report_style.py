"""How a report looks: light and dark, on a wide screen and on a phone."""

from __future__ import annotations

from typing import Final

# On a phone a table or a text that is too wide scrolls by itself; the page does not.
STYLE: Final = """
:root { color-scheme: light dark; --page: #fff; --box: #f6f7f9; --edge: #e0e0e0; --soft: #5f6368;
  --ink: #222222; --muted: #757575; --grid: #e4e4e4; --bars: #d5dde6;
  --line-0: #1f6fb4; --line-1: #d9822b; --line-2: #3a8f5c; --line-3: #a0468c; --line-4: #7b7b7b; --line-5: #b03a3a;
  --line-6: #5a54b8; --line-7: #8a6d1f; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --box: #22252b; --edge: #3a3e46; --soft: #a3a9b3;
  --ink: #e3e5e8; --muted: #8d939d; --grid: #30343b; --bars: #3d4754;
  --line-0: #64aef0; --line-1: #f0a04b; --line-2: #6cc48f; --line-3: #d98ac6; --line-4: #a5a5a5; --line-5: #e87979;
  --line-6: #9c97f0; --line-7: #cdae5b; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2em auto;
  max-width: 1240px; padding: 0 1em; }
h1 { margin: 0; overflow-wrap: anywhere; line-height: 1.2; }
h2 { border-bottom: 1px solid var(--edge); margin-top: 2em; }
h3 { margin: 1.2em 0 .3em; } h4 { margin: 0 0 .4em; font-size: 1em; }
p.kind { color: var(--soft); margin: .3em 0 1em; overflow-wrap: anywhere; }
ul.facts { list-style: none; padding: 0; color: var(--soft); margin: .8em 0 0; }
p.caption { color: var(--soft); font-size: .9em; margin: .4em 0 1em; }
code { font: .92em ui-monospace, monospace; background: var(--box); border-radius: 3px; padding: 0 .25em;
  overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(170px, 100%), 1fr)); gap: .7em;
  margin: .8em 0; }
.tile { background: var(--box); border-radius: 6px; padding: .5em .8em; }
.tile span { display: block; color: var(--soft); font-size: .85em; overflow-wrap: anywhere; }
.tile b { font-size: 1.15em; font-weight: 600; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.3em; border-radius: 4px; overflow: hidden; max-width: 760px; }
table { border-collapse: collapse; } .wide { overflow-x: auto; } .wide th, .wide td { white-space: nowrap; }
th, td { padding: .25em .8em; border-bottom: 1px solid var(--edge); text-align: right; }
th:first-child, td:first-child { text-align: left; }
table.phases { margin-top: .6em; } table.phases i { display: inline-block; width: .8em; height: .8em;
  border-radius: 2px; margin-right: .5em; }
.options { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 0 2em;
  margin-bottom: .8em; }
.options > div { min-width: 0; }
dl { display: grid; grid-template-columns: minmax(7em, 30%) 1fr; gap: .15em .9em; margin: 0; font-size: .92em; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); gap: 1em; }
figure { margin: 0; min-width: 0; } figure svg { width: 100%; height: auto; }
article { border: 1px solid var(--edge); border-radius: 6px; padding: .6em .9em; margin: .8em 0; }
article h3 { margin-top: 0; }
details { margin-bottom: .6em; } summary { color: var(--soft); cursor: pointer; }
.both { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 1.2em; }
.joint { min-width: 0; } .agent span { font-size: .85em; color: var(--soft); }
pre { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  background: var(--box); border-radius: 4px; padding: .5em .6em; margin: .1em 0 .6em; max-height: 22em;
  overflow-y: auto; }
@media (max-width: 600px) { body { margin: 1em auto; padding: 0 .7em; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: .4em; } .tiles { grid-template-columns: 1fr 1fr; } }
"""

PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{header}
</header>
{body}
</body>
</html>
"""
