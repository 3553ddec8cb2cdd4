//! The module graph of the workspace: which file uses which item that another file defines.
//!
//! Imports (`use` trees) and paths in code, inside macro calls too, are resolved through re-exports and glob imports to
//! the file that defines the item. Code under `#[cfg(test)]` is not part of the graph. A re-export counts as a use only
//! if its own file uses the name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use petgraph::{algo::tarjan_scc, graphmap::DiGraphMap};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{
    Attribute,
    parse::{ParseStream, Parser as _},
    visit::{self, Visit},
};

/// The names of a module below its crate's root.
type ModulePath = Vec<String>;

/// How many imports a path may lead through.
const MAX_DEPTH: usize = 16;

/// The modules of every crate.
#[derive(Default)]
pub(crate) struct ModuleGraph {
    crates: BTreeMap<String, BTreeMap<ModulePath, Module>>,
}

#[derive(Default)]
struct Module {
    file: String,
    /// Items by name, with the file that defines them: macros are items of the crate's root.
    items: BTreeMap<String, String>,
    children: BTreeSet<String>,
    imports: Vec<Import>,
    /// The paths in code, single identifiers included.
    paths: BTreeSet<Vec<String>>,
}

struct Import {
    /// The name in scope; `None` for a glob.
    name: Option<String>,
    path: Vec<String>,
    is_public: bool,
}

/// What a path refers to.
enum Target {
    Module { krate: String, module: ModulePath },
    Item { krate: String, file: String, name: String },
}

/// Uses of one node by another, with the names that are used.
pub(crate) type Edges = BTreeMap<(String, String), BTreeSet<String>>;

impl ModuleGraph {
    /// Adds a crate, whose root is a file, by the name that code uses for it.
    pub(crate) fn add(&mut self, krate: &str, root: &Path, workspace: &Path) {
        let mut reader = Reader { workspace, modules: BTreeMap::from([(Vec::new(), Module::default())]) };
        reader.read_file(Vec::new(), root, root.parent().unwrap());
        self.crates.insert(krate.to_owned(), reader.modules);
    }

    /// The uses between the files of each crate, and the uses between crates.
    pub(crate) fn edges(&self) -> (Edges, Edges) {
        let (mut files, mut crates) = (Edges::new(), Edges::new());
        for (krate, modules) in &self.crates {
            for (path, module) in modules {
                for target in self.uses(krate, path, module) {
                    let Target::Item { krate: to, file, name } = target else { continue };
                    if to != *krate {
                        crates.entry((krate.clone(), to)).or_default().insert(name);
                    } else if file != module.file {
                        files.entry((module.file.clone(), file)).or_default().insert(name);
                    }
                }
            }
        }
        (files, crates)
    }

    fn uses(&self, krate: &str, path: &ModulePath, module: &Module) -> Vec<Target> {
        let mut targets = Vec::new();
        let names: BTreeSet<_> = module.paths.iter().map(|it| &it[0]).collect();
        for import in &module.imports {
            let target = self.resolve(krate, path, &import.path, 0);
            match (&import.name, target) {
                (Some(name), target) if !import.is_public || names.contains(name) => targets.extend(target),
                (None, Some(Target::Module { krate, module })) => {
                    let globbed = names
                        .iter()
                        .filter_map(|it| self.lookup(&krate, &module, std::slice::from_ref(*it), 0));
                    targets.extend(globbed);
                }
                (None, Some(target)) => targets.push(target),
                _ => {}
            }
        }
        let paths = module.paths.iter().filter(|it| it.len() > 1);
        targets.extend(paths.filter_map(|it| self.resolve(krate, path, it, 0)));
        targets
    }

    fn resolve(&self, krate: &str, module: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.walk(krate, &Vec::new(), rest, depth),
            "self" => self.walk(krate, module, rest, depth),
            "super" => self.walk(krate, &module[..module.len().checked_sub(1)?].to_vec(), rest, depth),
            name => self.lookup(krate, module, path, depth).or_else(|| {
                self.crates.contains_key(name).then(|| self.walk(name, &Vec::new(), rest, depth))?
            }),
        }
    }

    /// Follows a path from a module.
    fn walk(&self, krate: &str, module: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
        let file = &self.crates.get(krate)?.get(module)?.file;
        match path.first().map(String::as_str) {
            None => Some(Target::Module { krate: krate.to_owned(), module: module.clone() }),
            Some("super") => {
                self.walk(krate, &module[..module.len().checked_sub(1)?].to_vec(), &path[1..], depth)
            }
            // What no item defines is generated by a macro of the module.
            Some(name) => self.lookup(krate, module, path, depth).or_else(|| {
                Some(Target::Item { krate: krate.to_owned(), file: file.clone(), name: name.to_owned() })
            }),
        }
    }

    /// Follows a path whose first name is in the scope of a module.
    fn lookup(&self, krate: &str, module: &ModulePath, path: &[String], depth: usize) -> Option<Target> {
        let scope = self.crates.get(krate)?.get(module)?;
        let (first, rest) = path.split_first()?;
        if depth > MAX_DEPTH {
            return None;
        }
        if scope.children.contains(first) {
            return self.walk(krate, &[&module[..], std::slice::from_ref(first)].concat(), rest, depth);
        }
        if let Some(file) = scope.items.get(first) {
            return Some(Target::Item { krate: krate.to_owned(), file: file.clone(), name: first.clone() });
        }
        let named = scope.imports.iter().filter(|it| it.name.as_ref() == Some(first));
        // `use name;` imports the crate of that name.
        for import in named.filter(|it| it.path.first() != Some(first)) {
            let target = self.resolve(krate, module, &[&import.path, rest].concat(), depth + 1);
            if target.is_some() {
                return target;
            }
        }
        scope.imports.iter().filter(|it| it.name.is_none()).find_map(|glob| {
            match self.resolve(krate, module, &glob.path, depth + 1)? {
                Target::Module { krate, module } => self.lookup(&krate, &module, path, depth + 1),
                Target::Item { .. } => None,
            }
        })
    }
}

struct Reader<'a> {
    workspace: &'a Path,
    modules: BTreeMap<ModulePath, Module>,
}

impl Reader<'_> {
    fn read_file(&mut self, path: ModulePath, file: &Path, children: &Path) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let name = file.strip_prefix(self.workspace).unwrap().display().to_string();
        self.read_items(&path, &name, children, parsed.items);
    }

    fn read_items(&mut self, path: &ModulePath, file: &str, children: &Path, items: Vec<syn::Item>) {
        self.modules.entry(path.clone()).or_default().file = file.to_owned();
        for mut item in items {
            if is_test(&item) {
                continue;
            }
            if let syn::Item::Mod(module) = item {
                self.read_module(path, file, children, module);
                continue;
            }
            if let syn::Item::Impl(block) = &mut item {
                block.items.retain(|it| !is_test(it));
            }
            if let syn::Item::Macro(it) = &item
                && let Some(name) = &it.ident
                && it.attrs.iter().any(|it| it.path().is_ident("macro_export"))
            {
                let root = self.modules.entry(Vec::new()).or_default();
                root.items.insert(name.to_string(), file.to_owned());
            }
            let module = self.modules.entry(path.clone()).or_default();
            if let Some(name) = item_name(&item) {
                module.items.insert(name, file.to_owned());
            }
            let mut uses = Uses(&mut module.imports);
            uses.visit_item(&item);
            if !matches!(item, syn::Item::Use(_)) {
                read_paths(item.to_token_stream(), &mut module.paths);
            }
        }
    }

    fn read_module(&mut self, path: &ModulePath, file: &str, children: &Path, module: syn::ItemMod) {
        let name = module.ident.to_string();
        self.modules.entry(path.clone()).or_default().children.insert(name.clone());
        let child = [&path[..], std::slice::from_ref(&name)].concat();
        let below = children.join(&name);
        if let Some((_, items)) = module.content {
            return self.read_items(&child, file, &below, items);
        }
        assert!(
            !module.attrs.iter().any(|it| it.path().is_ident("path")),
            "{file}: `{name}` has another file"
        );
        // A file in the build's output folder has no other module's items.
        let candidates = [children.join(format!("{name}.rs")), below.join("mod.rs")];
        if let Some(found) = candidates.iter().find(|it| it.exists()) {
            self.read_file(child, found, &below);
        }
    }
}

/// Collects imports, those inside functions too.
struct Uses<'a>(&'a mut Vec<Import>);

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_public = !matches!(item.vis, syn::Visibility::Inherited);
        flatten(&item.tree, &mut Vec::new(), is_public, self.0);
        visit::visit_item_use(self, item);
    }
}

fn flatten(tree: &syn::UseTree, prefix: &mut Vec<String>, is_public: bool, imports: &mut Vec<Import>) {
    let mut add = |name: Option<&syn::Ident>, last: Option<&syn::Ident>| {
        let mut path = prefix.clone();
        let is_self = last.is_some_and(|it| it == "self");
        path.extend(last.filter(|_| !is_self).map(ToString::to_string));
        let name = if is_self && name == last { path.last().cloned() } else { name.map(ToString::to_string) };
        imports.push(Import { name, path, is_public });
    };
    match tree {
        syn::UseTree::Path(it) => {
            prefix.push(it.ident.to_string());
            flatten(&it.tree, prefix, is_public, imports);
            prefix.pop();
        }
        syn::UseTree::Name(it) => add(Some(&it.ident), Some(&it.ident)),
        syn::UseTree::Rename(it) => add(Some(&it.rename), Some(&it.ident)),
        syn::UseTree::Glob(_) => add(None, None),
        syn::UseTree::Group(it) => {
            it.items.iter().for_each(|tree| flatten(tree, prefix, is_public, imports));
        }
    }
}

/// Collects the paths in code: `a::b::c`, or a single identifier that is not a field, a method or a lifetime.
fn read_paths(tokens: TokenStream, paths: &mut BTreeSet<Vec<String>>) {
    let is_punct = |it: Option<&TokenTree>, c| matches!(it, Some(TokenTree::Punct(it)) if it.as_char() == c);
    let tokens: Vec<_> = tokens.into_iter().collect();
    let is_separator = |at: usize| is_punct(tokens.get(at), ':') && is_punct(tokens.get(at + 1), ':');
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Group(group) => read_paths(group.stream(), paths),
            TokenTree::Ident(ident) => {
                let before = at.checked_sub(1).and_then(|it| tokens.get(it));
                let is_member = is_punct(before, '.') || is_punct(before, '\'') || is_punct(before, ':');
                let is_type = is_punct(before, ':') && !(at >= 2 && is_separator(at - 2));
                let mut path = vec![ident.to_string()];
                while is_separator(at + 1) {
                    let Some(TokenTree::Ident(next)) = tokens.get(at + 3) else { break };
                    path.push(next.to_string());
                    at += 3;
                }
                let is_field = path.len() == 1 && is_punct(tokens.get(at + 1), ':') && !is_separator(at + 1);
                if (!is_member || is_type) && !is_field {
                    paths.insert(path);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Whether the attributes of an item leave it to tests.
fn is_test(item: &impl ToTokens) -> bool {
    let attributes = |input: ParseStream<'_>| {
        let attributes = input.call(Attribute::parse_outer)?;
        input.parse::<TokenStream>()?;
        Ok(attributes)
    };
    attributes.parse2(item.to_token_stream()).unwrap().iter().any(|it| {
        let tokens = it.meta.to_token_stream().to_string().replace(' ', "");
        tokens == "test"
            || tokens.ends_with("::test")
            || tokens.starts_with("cfg(test")
            || tokens.starts_with("cfg(all(test,")
    })
}

fn item_name(item: &syn::Item) -> Option<String> {
    use syn::Item::{Const, Enum, Fn, Macro, Static, Struct, Trait, TraitAlias, Type, Union};
    let ident = match item {
        Const(it) => &it.ident,
        Enum(it) => &it.ident,
        Fn(it) => &it.sig.ident,
        Macro(it) => it.ident.as_ref()?,
        Static(it) => &it.ident,
        Struct(it) => &it.ident,
        Trait(it) => &it.ident,
        TraitAlias(it) => &it.ident,
        Type(it) => &it.ident,
        Union(it) => &it.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Describes each set of nodes that use each other in a circle, with the names that tie it.
pub(crate) fn cycles(edges: &Edges) -> Vec<String> {
    let graph: DiGraphMap<&str, ()> = edges.keys().map(|(from, to)| (&**from, &**to)).collect();
    let circles = tarjan_scc(&graph).into_iter().filter(|it| it.len() > 1);
    let describe = |circle: Vec<&str>| {
        let ties =
            edges.iter().filter(|((from, to), _)| circle.contains(&&**from) && circle.contains(&&**to));
        let lines = ties.map(|((from, to), names)| {
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            format!("  {from} uses {} of {to}\n", names.join(", "))
        });
        format!("{} use each other:\n{}", circle.len(), lines.collect::<String>())
    };
    circles.map(describe).collect()
}
